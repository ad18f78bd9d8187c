package services

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

// As cluster DNS has it.
const ttlS = 5

// ServeNames answers over UDP and TCP. All names but those of services do not exist.
func ServeNames(ctx context.Context, listen, domain string, lookup *Lookup) error {
	packets, err := net.ListenPacket("udp", listen)
	if err != nil {
		return err
	}
	defer packets.Close()
	listener, err := net.Listen("tcp", listen)
	if err != nil {
		return err
	}
	defer listener.Close()
	server := &names{suffix: ".svc." + domain + ".", lookup: lookup}
	failed := make(chan error, 2)
	go func() { failed <- server.servePackets(packets) }()
	go func() { failed <- server.serveConnections(listener) }()
	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
		return nil
	}
}

type names struct {
	suffix string
	lookup *Lookup
}

func (server *names) servePackets(packets net.PacketConn) error {
	buffer := make([]byte, 4096)
	for {
		length, from, err := packets.ReadFrom(buffer)
		if errors.Is(err, net.ErrClosed) {
			return err
		}
		// Other errors are of a client that is gone.
		if err != nil {
			continue
		}
		if reply := server.answer(buffer[:length]); reply != nil {
			_, _ = packets.WriteTo(reply, from)
		}
	}
}

func (server *names) serveConnections(listener net.Listener) error {
	for {
		connection, err := listener.Accept()
		if err != nil {
			return err
		}
		go server.serveConnection(connection)
	}
}

func (server *names) serveConnection(connection net.Conn) {
	defer connection.Close()
	for {
		_ = connection.SetDeadline(time.Now().Add(10 * time.Second))
		var length [2]byte
		if _, err := io.ReadFull(connection, length[:]); err != nil {
			return
		}
		query := make([]byte, binary.BigEndian.Uint16(length[:]))
		if _, err := io.ReadFull(connection, query); err != nil {
			return
		}
		reply := server.answer(query)
		if reply == nil {
			return
		}
		if _, err := connection.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(reply))), reply...)); err != nil {
			return
		}
	}
}

// answer is nil for what is no query.
func (server *names) answer(query []byte) []byte {
	var parser dnsmessage.Parser
	header, err := parser.Start(query)
	if err != nil || header.Response {
		return nil
	}
	question, err := parser.Question()
	if err != nil {
		return nil
	}
	name := strings.ToLower(question.Name.String())
	short, isOurs := strings.CutSuffix(name, server.suffix)
	reply := dnsmessage.Message{
		Header: dnsmessage.Header{
			ID: header.ID, Response: true, Authoritative: true, RecursionDesired: header.RecursionDesired, RecursionAvailable: true,
		},
		Questions: []dnsmessage.Question{question},
	}
	addresses, exists := server.lookup.resolve(short)
	if !isOurs || !exists {
		reply.RCode = dnsmessage.RCodeNameError
	} else if question.Type == dnsmessage.TypeA {
		rand.Shuffle(len(addresses), func(a, b int) { addresses[a], addresses[b] = addresses[b], addresses[a] })
		for _, address := range addresses {
			reply.Answers = append(reply.Answers, dnsmessage.Resource{
				Header: dnsmessage.ResourceHeader{Name: question.Name, Class: dnsmessage.ClassINET, TTL: ttlS},
				Body:   &dnsmessage.AResource{A: address.As4()},
			})
		}
	}
	packed, err := reply.Pack()
	if err != nil {
		return nil
	}
	return packed
}
