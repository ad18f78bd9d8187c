// A server on the centrifuge library, as the fan-out benchmark measures it: anybody may connect, subscribe and publish.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"runtime/debug"
	"time"

	"github.com/centrifugal/centrifuge"
)

const library = "github.com/centrifugal/centrifuge"

func main() {
	batching := flag.Bool("batching", false, "collect the messages of a connection for 5 ms before they are written")
	version := flag.Bool("version", false, "print the version of the library and end")
	flag.Parse()
	if *version {
		fmt.Println(versions())
		return
	}
	if err := serve(*batching); err != nil {
		fmt.Fprintln(os.Stderr, "centrifuge:", err)
		os.Exit(1)
	}
}

// serve listens on a free port, which is the one line on stdout, until stdin ends.
func serve(batching bool) error {
	node, err := centrifuge.New(centrifuge.Config{})
	if err != nil {
		return err
	}
	node.OnConnecting(func(context.Context, centrifuge.ConnectEvent) (centrifuge.ConnectReply, error) {
		reply := centrifuge.ConnectReply{Credentials: &centrifuge.Credentials{}}
		if batching {
			reply.WriteDelay = 5 * time.Millisecond
			reply.MaxMessagesInFrame = -1
			reply.ReplyWithoutQueue = true
		}
		return reply, nil
	})
	node.OnConnect(allowAll)
	if err := node.Run(); err != nil {
		return err
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	fmt.Println(listener.Addr())
	go func() {
		// Only the end of stdin counts, not what comes before it or why it ended.
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}()
	sockets := centrifuge.NewWebsocketHandler(node, centrifuge.WebsocketConfig{
		ReadBufferSize:     1024,
		UseWriteBufferPool: true,
	})
	if err := http.Serve(listener, sockets); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

func allowAll(client *centrifuge.Client) {
	client.OnSubscribe(func(_ centrifuge.SubscribeEvent, answer centrifuge.SubscribeCallback) {
		answer(centrifuge.SubscribeReply{}, nil)
	})
	client.OnPublish(func(_ centrifuge.PublishEvent, answer centrifuge.PublishCallback) {
		answer(centrifuge.PublishReply{}, nil)
	})
}

func versions() string {
	found := "of unknown version"
	if build, ok := debug.ReadBuildInfo(); ok {
		for _, module := range build.Deps {
			if module.Path == library {
				found = module.Version
			}
		}
	}
	return "centrifuge " + found + ", " + runtime.Version()
}
