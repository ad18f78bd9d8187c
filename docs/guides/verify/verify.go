// go run verify.go SECRET TIMESTAMP SIGNATURE < body
package main

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"strconv"
	"time"
)

// body holds the bytes that were received, before any parser.
func isFromFanfare(secret, timestamp, signature string, body []byte) bool {
	sent, err := strconv.ParseUint(timestamp, 10, 62)
	if err != nil || time.Since(time.UnixMilli(int64(sent))).Abs() > 5*time.Minute {
		return false
	}
	mac := hmac.New(sha256.New, []byte(secret))
	mac.Write([]byte(timestamp + "."))
	mac.Write(body)
	expected := "v1=" + hex.EncodeToString(mac.Sum(nil))
	return hmac.Equal([]byte(expected), []byte(signature))
}

func main() {
	body, err := io.ReadAll(os.Stdin)
	if err == nil && len(os.Args) == 4 && isFromFanfare(os.Args[1], os.Args[2], os.Args[3], body) {
		fmt.Println("verified")
	} else {
		fmt.Println("refused")
	}
}
