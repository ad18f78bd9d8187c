// FANFARE_KEY=<secret>.<keyName> go run token_request.go [CLIENT_ID] [CAPABILITY]
package main

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"strings"
	"time"
)

type tokenRequest struct {
	KeyName    string `json:"keyName"`
	TTL        int64  `json:"ttl"`
	Capability string `json:"capability"`
	ClientID   string `json:"clientId"`
	Timestamp  int64  `json:"timestamp"`
	Nonce      string `json:"nonce"`
	MAC        string `json:"mac"`
}

// newTokenRequest signs a request for a token that lasts an hour.
// An empty capability asks for everything that the key allows.
func newTokenRequest(key, clientID, capability string) (tokenRequest, error) {
	dot := strings.LastIndex(key, ".")
	if dot < 1 {
		return tokenRequest{}, fmt.Errorf("FANFARE_KEY must be <secret>.<keyName>")
	}
	nonce := make([]byte, 16)
	if _, err := rand.Read(nonce); err != nil {
		return tokenRequest{}, err
	}
	request := tokenRequest{
		KeyName:    key[dot+1:],
		TTL:        time.Hour.Milliseconds(),
		Capability: capability,
		ClientID:   clientID,
		Timestamp:  time.Now().UnixMilli(),
		Nonce:      hex.EncodeToString(nonce),
	}
	mac := hmac.New(sha256.New, []byte(key[:dot]))
	fmt.Fprintf(mac, "%s\n%d\n%s\n%s\n%d\n%s\n",
		request.KeyName, request.TTL, request.Capability, request.ClientID, request.Timestamp, request.Nonce)
	request.MAC = base64.StdEncoding.EncodeToString(mac.Sum(nil))
	return request, nil
}

func main() {
	arguments := append(os.Args[1:], "", "")
	request, err := newTokenRequest(os.Getenv("FANFARE_KEY"), arguments[0], arguments[1])
	if err != nil {
		log.Fatal(err)
	}
	if err := json.NewEncoder(os.Stdout).Encode(request); err != nil {
		log.Fatal(err)
	}
}
