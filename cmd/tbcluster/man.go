package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/google/renameio/v2"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"tbcluster/api/fault"
)

func newManCommand(*globals) *cobra.Command {
	return &cobra.Command{
		Use:    "man DIRECTORY",
		Short:  "Write a manual page for every command",
		Hidden: true, // of use to whoever packages it
		Long: `Writes a manual page for every command into a directory, as man(7) input.
` + exitHelpAlone(fault.FileIO),
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error { return writeManual(cmd.Root(), args[0]) },
	}
}

// writeManual writes the pages of a command and of all below it.
func writeManual(root *cobra.Command, dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fault.New(fault.FileIO, "make the directory of manual pages", err, "name another directory").At(dir)
	}
	for _, c := range manualCommands(root) {
		path := filepath.Join(dir, pageName(c)+".1")
		if err := renameio.WriteFile(path, manualPage(c), 0o644); err != nil {
			return fault.New(fault.FileIO, "write a manual page", err, "free some space, or name another directory").At(path)
		}
	}
	return nil
}

// manualCommands are the commands that have a page: those that help lists.
func manualCommands(c *cobra.Command) []*cobra.Command {
	list := []*cobra.Command{c}
	for _, sub := range c.Commands() {
		if !sub.Hidden && sub.Name() != "help" {
			list = append(list, manualCommands(sub)...)
		}
	}
	return list
}

// pageName is "tbcluster-pair" for `tbcluster pair`.
func pageName(c *cobra.Command) string { return strings.ReplaceAll(c.CommandPath(), " ", "-") }

// manualPage is the page of one command. It says what --help says, in the order
// of man pages. It holds no date: the same source gives the same page.
func manualPage(c *cobra.Command) []byte {
	c.InitDefaultHelpFlag()
	var b bytes.Buffer
	section := func(name string) { fmt.Fprintf(&b, ".SH %s\n", name) }
	fmt.Fprintf(&b, ".TH %s 1 \"\" \"tbcluster %s\" \"tbcluster\"\n.nh\n.ad l\n", quoted(strings.ToUpper(pageName(c))), escaped(buildVersion()))
	section("NAME")
	fmt.Fprintf(&b, "%s \\- %s\n", escaped(pageName(c)), escaped(lowerFirst(c.Short)))
	section("SYNOPSIS")
	use := c.UseLine()
	if c.HasAvailableSubCommands() && !c.Runnable() {
		use = c.CommandPath() + " COMMAND"
	}
	fmt.Fprintf(&b, ".B %s\n", line(use))
	long, exits, _ := strings.Cut(c.Long, "\n\nEXIT STATUS\n")
	section("DESCRIPTION")
	if long == "" {
		long = c.Short + "."
	}
	preformatted(&b, long)
	if subs := manualCommands(c)[1:]; len(subs) > 0 {
		section("COMMANDS")
		for _, sub := range subs {
			if sub.Parent() == c {
				fmt.Fprintf(&b, ".TP\n.BR %s (1)\n%s\n", escaped(pageName(sub)), line(sub.Short))
			}
		}
	}
	for _, set := range []struct {
		name  string
		flags *pflag.FlagSet
	}{{"OPTIONS", c.NonInheritedFlags()}, {"OPTIONS OF EVERY COMMAND", c.InheritedFlags()}} {
		if !set.flags.HasAvailableFlags() {
			continue
		}
		section(set.name)
		set.flags.VisitAll(func(f *pflag.Flag) {
			if f.Hidden {
				return
			}
			name, usage := pflag.UnquoteUsage(f)
			b.WriteString(".TP\n")
			if f.Shorthand != "" {
				fmt.Fprintf(&b, "\\fB\\-%s\\fR, ", escaped(f.Shorthand))
			}
			fmt.Fprintf(&b, "\\fB\\-\\-%s\\fR", escaped(f.Name))
			if name != "" {
				fmt.Fprintf(&b, " \\fI%s\\fR", escaped(name))
			}
			fmt.Fprintf(&b, "\n%s\n", line(usage))
		})
	}
	if exits != "" {
		section("EXIT STATUS")
		for l := range strings.Lines(exits) {
			code, meaning, _ := strings.Cut(strings.TrimSpace(l), " ")
			if code != "" {
				fmt.Fprintf(&b, ".TP\n.B %s\n%s\n", escaped(code), line(strings.TrimSpace(meaning)))
			}
		}
	}
	if c.HasParent() {
		section("SEE ALSO")
		also := []*cobra.Command{c.Parent()}
		for _, sib := range c.Parent().Commands() {
			if sib != c && c.Parent().HasParent() && !sib.Hidden && sib.Name() != "help" {
				also = append(also, sib)
			}
		}
		for i, o := range also {
			comma := ","
			if i == len(also)-1 {
				comma = ""
			}
			fmt.Fprintf(&b, ".BR %s (1)%s\n", escaped(pageName(o)), comma)
		}
	}
	return b.Bytes()
}

// preformatted writes text as it is laid out; paragraphs stay apart.
func preformatted(b *bytes.Buffer, text string) {
	b.WriteString(".nf\n")
	for l := range strings.Lines(strings.TrimSpace(text)) {
		b.WriteString(line(strings.TrimRight(l, "\n")) + "\n")
	}
	b.WriteString(".fi\n")
}

// line is a line of text that is no request of roff, whatever it begins with.
func line(s string) string {
	s = escaped(s)
	if strings.HasPrefix(s, ".") || strings.HasPrefix(s, "'") {
		s = `\&` + s
	}
	return s
}

// escaped is text in which nothing has a meaning for roff. A minus is one that
// can be copied from the page and typed.
func escaped(s string) string {
	return strings.NewReplacer(`\`, `\e`, `-`, `\-`, "`", `\(ga`, `'`, `\(aq`, `^`, `\(ha`, `~`, `\(ti`).Replace(s)
}

// quoted is an argument of a request.
func quoted(s string) string { return `"` + strings.ReplaceAll(escaped(s), `"`, `""`) + `"` }

// lowerFirst makes a sentence's beginning the middle of one.
func lowerFirst(s string) string {
	if len(s) > 1 && s[1] >= 'a' && s[1] <= 'z' {
		return strings.ToLower(s[:1]) + s[1:]
	}
	return s
}
