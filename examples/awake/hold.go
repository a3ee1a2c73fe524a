// Holds the sandbox awake while a command runs.
//
//	go run hold.go make test
//
// A hold ends with its connection, however the program ends. AWAKE_SOCKET names another socket.
package main

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
)

// Hold raises a hold, and returns when it counts. Lines that come before a sleep, such as "sleep 1500" or
// "sleep 1500 cap", go to onSleep. Close the connection to let go.
func Hold(onSleep func(line string)) (net.Conn, error) {
	path := os.Getenv("AWAKE_SOCKET")
	if path == "" {
		path = "/run/sbx/awake"
	}
	conn, err := net.Dial("unix", path)
	if err != nil {
		return nil, err
	}
	if _, err := conn.Write([]byte("+")); err != nil {
		conn.Close()
		return nil, err
	}
	lines := bufio.NewScanner(conn)
	if !lines.Scan() { // "held 1 1"
		conn.Close()
		return nil, errors.New("the awake socket ended")
	}
	if !strings.HasPrefix(lines.Text(), "held ") { // "error <why>"
		conn.Close()
		return nil, errors.New(lines.Text())
	}
	go func() {
		for lines.Scan() {
			if strings.HasPrefix(lines.Text(), "sleep ") {
				onSleep(lines.Text())
			}
		}
	}()
	return conn, nil
}

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: hold COMMAND [ARGUMENT…]")
		os.Exit(2)
	}
	conn, err := Hold(func(line string) { fmt.Fprintln(os.Stderr, line) })
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	defer conn.Close()
	command := exec.Command(os.Args[1], os.Args[2:]...)
	command.Stdin, command.Stdout, command.Stderr = os.Stdin, os.Stdout, os.Stderr
	if err := command.Run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
