// Command attacker is a hostile process of a sandbox, for the tests of test/integration: it moves the directories around a
// volume's target as fast as it can, so that whoever resolves the target by name sooner or later resolves something else.
// It runs inside the sandbox, with the rights that any process there has, until it is killed.
//
// Its arguments are attacks, which run all at once:
//
//	exchange:A:B   exchanges two directory entries, again and again (a directory and a symlink, say)
//	relink:DIR:TO  replaces a directory by a symlink to TO, and that by a directory again
//	flap:DIR       removes and makes a directory
//
// The parents of these paths are opened before the first attack begins: an attack hits the directory that was meant, also
// when others have moved that meanwhile.
package main

import (
	"fmt"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"
)

func main() {
	var attacks []func()
	for _, arg := range os.Args[1:] {
		a, err := parse(strings.Split(arg, ":"))
		if err != nil {
			fmt.Fprintf(os.Stderr, "attacker: %s: %v\n", arg, err)
			os.Exit(2)
		}
		attacks = append(attacks, a)
	}
	for _, a := range attacks {
		go func() {
			for {
				a()
			}
		}()
	}
	select {}
}

// parse makes one round of an attack. That one of its calls fails is in the nature of a race: the next round comes at once.
func parse(words []string) (func(), error) {
	if len(words) < 2 {
		return nil, fmt.Errorf("no path")
	}
	dir, err := unix.Open(path.Dir(words[1]), unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	name := path.Base(words[1])
	switch {
	case words[0] == "exchange" && len(words) == 3:
		other, err := unix.Open(path.Dir(words[2]), unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
		if err != nil {
			return nil, err
		}
		return func() { _ = unix.Renameat2(dir, name, other, path.Base(words[2]), unix.RENAME_EXCHANGE) }, nil
	case words[0] == "relink" && len(words) == 3:
		return func() {
			if unix.Unlinkat(dir, name, unix.AT_REMOVEDIR) == nil {
				_ = unix.Symlinkat(words[2], dir, name)
			}
			_ = unix.Unlinkat(dir, name, 0)
			_ = unix.Mkdirat(dir, name, 0o755)
		}, nil
	case words[0] == "flap" && len(words) == 2:
		return func() {
			_ = unix.Unlinkat(dir, name, unix.AT_REMOVEDIR)
			_ = unix.Mkdirat(dir, name, 0o755)
		}, nil
	}
	return nil, fmt.Errorf("unknown attack")
}
