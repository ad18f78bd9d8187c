package pods

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"
)

// The log of a container, in the form that `kubectl logs` reads: a time, the stream, F for a whole line or P for a part, the text.
type logFile struct {
	lock sync.Mutex
	file *os.File
}

func openLog(path string) (*logFile, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	log := &logFile{}
	file, err := open(path)
	log.file = file
	return log, err
}

func open(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
}

func (log *logFile) path() string {
	if log == nil {
		return ""
	}
	return log.file.Name()
}

func (log *logFile) reopen() error {
	if log == nil {
		return nil
	}
	log.lock.Lock()
	defer log.lock.Unlock()
	file, err := open(log.file.Name())
	if err == nil {
		log.file.Close()
		log.file = file
	}
	return err
}

// stream is a file for one process to write to; what is written is appended to the log until all of its writers have ended.
func (log *logFile) stream(name string) *os.File {
	read, write, err := os.Pipe()
	if err != nil || log == nil {
		null, _ := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
		return null
	}
	go func() {
		defer read.Close()
		lines := bufio.NewReaderSize(read, 16<<10)
		for {
			line, isPart, err := lines.ReadLine()
			if err != nil {
				return
			}
			tag := "F"
			if isPart {
				tag = "P"
			}
			log.lock.Lock()
			fmt.Fprintf(log.file, "%s %s %s %s\n", time.Now().Format(time.RFC3339Nano), name, tag, line)
			log.lock.Unlock()
		}
	}()
	return write
}
