# FANFARE_KEY=<secret>.<keyName> ruby token_request.rb [CLIENT_ID] [CAPABILITY]
require "json"
require "openssl"
require "securerandom"

# A request for a token that lasts an hour. An empty capability asks for everything that the key allows.
def token_request(key, client_id = "", capability = "")
  secret, _, key_name = key.rpartition(".")
  raise ArgumentError, "FANFARE_KEY must be <secret>.<keyName>" if secret.empty?
  request = {
    keyName: key_name,
    ttl: 60 * 60 * 1000,
    capability: capability,
    clientId: client_id,
    timestamp: Process.clock_gettime(Process::CLOCK_REALTIME, :millisecond),
    nonce: SecureRandom.hex(16)
  }
  # A hash keeps its order, which is the order of the signed text.
  text = request.values.map { |value| "#{value}\n" }.join
  digest = OpenSSL::HMAC.digest("SHA256", secret, text)
  request.merge(mac: [digest].pack("m0"))
end

puts JSON.generate(token_request(ENV.fetch("FANFARE_KEY", ""), *ARGV.first(2))) if $PROGRAM_NAME == __FILE__
