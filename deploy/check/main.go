// Reads the compose file by the rules of Compose, the Dockerfile by those of BuildKit, what alerts and panels ask for by those of Prometheus,
// and rendered objects of the chart by the types of the operators that define their kinds. Says what is wrong and ends with 1.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/compose-spec/compose-go/v2/cli"
	"github.com/moby/buildkit/frontend/dockerfile/instructions"
	"github.com/moby/buildkit/frontend/dockerfile/linter"
	"github.com/moby/buildkit/frontend/dockerfile/parser"
)

func main() {
	if len(os.Args) != 2 {
		fail(fmt.Errorf("usage: check DEPLOY, with objects of the chart on standard input"))
	}
	deploy, err := filepath.Abs(os.Args[1])
	if err != nil {
		fail(err)
	}
	composed(filepath.Join(deploy, "compose.yaml"))
	dockerfile(filepath.Join(deploy, "Dockerfile"))
	queries(deploy)
	if err := kinds(os.Stdin); err != nil {
		fail(err)
	}
}

// composed loads the file as Compose does, which checks it against the schema and each file that a service mounts for being there.
func composed(file string) {
	options, err := cli.NewProjectOptions([]string{file}, cli.WithResolvedPaths(true))
	if err != nil {
		fail(err)
	}
	project, err := options.LoadProject(context.Background())
	if err != nil {
		fail(err)
	}
	for name, service := range project.Services {
		for _, volume := range service.Volumes {
			if volume.Type != "bind" {
				continue
			}
			secret := filepath.Base(filepath.Dir(volume.Source)) == "secrets"
			if _, err := os.Stat(volume.Source); err != nil && !secret {
				fail(fmt.Errorf("%s: service %s: %w", file, name, err))
			}
		}
	}
	fmt.Printf("%s: %d services\n", file, len(project.Services))
}

func dockerfile(file string) {
	content, err := os.Open(file)
	if err != nil {
		fail(err)
	}
	defer content.Close()
	parsed, err := parser.Parse(content)
	if err != nil {
		fail(fmt.Errorf("%s: %w", file, err))
	}
	warnings := len(parsed.Warnings)
	for _, warning := range parsed.Warnings {
		fmt.Fprintln(os.Stderr, file, warning.Short)
	}
	warn := func(rule, description, url, message string, location []parser.Range) {
		warnings++
		fmt.Fprintf(os.Stderr, "%s: %s: %s\n", file, rule, message)
	}
	stages, _, err := instructions.Parse(parsed.AST, linter.New(&linter.Config{Warn: warn}))
	if err != nil {
		fail(fmt.Errorf("%s: %w", file, err))
	}
	last := stages[len(stages)-1]
	user := ""
	for _, command := range last.Commands {
		if of, is := command.(*instructions.UserCommand); is {
			user = of.User
		}
		if _, is := command.(*instructions.RunCommand); is {
			fail(fmt.Errorf("%s: the last stage has no shell to run a command", file))
		}
	}
	if user == "" || user == "root" || user == "0" {
		fail(fmt.Errorf("%s: the image runs as root", file))
	}
	if warnings > 0 {
		os.Exit(1)
	}
	fmt.Printf("%s: %d stages\n", file, len(stages))
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}
