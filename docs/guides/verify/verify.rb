# ruby verify.rb SECRET TIMESTAMP SIGNATURE < body
require "openssl"

# `body` holds the bytes that were received, before any parser.
def from_fanfare?(secret, timestamp, signature, body)
  return false unless timestamp.match?(/\A\d+\z/)
  return false if (Time.now.to_f * 1000 - timestamp.to_i).abs > 5 * 60 * 1000
  expected = "v1=" + OpenSSL::HMAC.hexdigest("SHA256", secret, "#{timestamp}.".b + body.b)
  OpenSSL.secure_compare(expected, signature)
end

if $PROGRAM_NAME == __FILE__
  secret, timestamp, signature = ARGV
  puts from_fanfare?(secret, timestamp, signature, $stdin.binmode.read) ? "verified" : "refused"
end
