// Command attacker is a hostile process of a sandbox, for the tests of test/integration: it moves the directories around a
// volume's target as fast as it can, so that whoever resolves the target by name sooner or later resolves something else.
// It runs inside the sandbox, with the rights that any process there has, until it is killed.
//
//	attacker exchange A B   exchanges two directory entries, again and again (a directory and a symlink, say)
//	attacker flap DIR       removes and makes a directory
//	attacker relink DIR TO  replaces a directory by a symlink to TO, and that by a directory again
package main

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

func main() {
	if err := attack(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "attacker:", err)
		os.Exit(2)
	}
}

// attack never ends by itself. That one of its calls fails is in the nature of a race: the next round comes at once.
func attack(args []string) error {
	if len(args) < 2 {
		return fmt.Errorf("arguments %q: see the package comment", args)
	}
	at := args[1]
	switch {
	case args[0] == "exchange" && len(args) == 3:
		for {
			_ = unix.Renameat2(unix.AT_FDCWD, at, unix.AT_FDCWD, args[2], unix.RENAME_EXCHANGE)
		}
	case args[0] == "flap":
		for {
			_ = unix.Rmdir(at)
			_ = unix.Mkdir(at, 0o755)
		}
	case args[0] == "relink" && len(args) == 3:
		for {
			if unix.Rmdir(at) == nil {
				_ = unix.Symlink(args[2], at)
			}
			_ = unix.Unlink(at)
			_ = unix.Mkdir(at, 0o755)
		}
	}
	return fmt.Errorf("arguments %q: see the package comment", args)
}
