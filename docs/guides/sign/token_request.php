<?php
// FANFARE_KEY=<secret>.<keyName> php token_request.php [CLIENT_ID] [CAPABILITY]

/** A request for a token that lasts an hour. An empty capability asks for everything that the key allows. */
function tokenRequest(string $key, string $clientId, string $capability): array
{
    $dot = strrpos($key, '.');
    if (!$dot) {
        throw new InvalidArgumentException('FANFARE_KEY must be <secret>.<keyName>');
    }
    $request = [
        'keyName' => substr($key, $dot + 1),
        'ttl' => 60 * 60 * 1000,
        'capability' => $capability,
        'clientId' => $clientId,
        'timestamp' => (int) (microtime(true) * 1000),
        'nonce' => bin2hex(random_bytes(16)),
    ];
    // An array keeps its order, which is the order of the signed text.
    $text = implode("\n", $request) . "\n";
    $digest = hash_hmac('sha256', $text, substr($key, 0, $dot), true);
    return $request + ['mac' => base64_encode($digest)];
}

echo json_encode(tokenRequest((string) getenv('FANFARE_KEY'), $argv[1] ?? '', $argv[2] ?? ''), JSON_THROW_ON_ERROR), "\n";
