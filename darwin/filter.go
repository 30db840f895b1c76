package darwin

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"tbcluster/host"
)

// anchor is where our rules of the packet filter are. The rules that macOS loads
// at boot (/etc/pf.conf) call all anchors below com.apple, so that no file of
// the system needs to be changed.
const anchor = "com.apple/tbcluster"

// tokenLabel is the start of a label in our rules: behind it is the token that
// `pfctl -E` gave when it switched the filter on for us, and that switching off
// again takes. So it is kept where the rules are, and lost when they are.
const tokenLabel = "tbcluster-token-"

// filterRules are the rules of the anchor (pf.conf(5)). The first rule that fits
// decides. What is addressed to one of our addresses is passed on one of our
// interfaces and on the loopback, and dropped elsewhere; nothing else is
// touched.
func filterRules(c host.Change, token string) string {
	if len(c.Addresses) == 0 {
		return ""
	}
	var to []string
	for _, a := range c.Addresses {
		to = append(to, a.String())
	}
	slices.Sort(to)
	target := "to { " + strings.Join(slices.Compact(to), ", ") + " }"
	open := append([]string{"lo0"}, c.Interfaces...)
	slices.Sort(open)
	var b strings.Builder
	for _, i := range slices.Compact(open) {
		fmt.Fprintf(&b, "pass in quick on %s from any %s no state\n", i, target)
	}
	fmt.Fprintf(&b, "block drop in quick from any %s label %q\n", target, tokenLabel+token)
	return b.String()
}

// load is a shell's script that loads the rules in its first argument: pfctl
// reads them from its input only.
const load = `printf '%s' "$1" | pfctl -q -a ` + anchor + ` -f -`

func filterCommands(c host.Change) []string {
	return []string{
		"pfctl -E",
		"printf '%s' '" + filterRules(c, "") + "' | pfctl -q -a " + anchor + " -f -",
	}
}

// parseToken returns what `pfctl -E` prints after "Token : ", "" if nothing.
func parseToken(text string) string {
	for line := range strings.Lines(text) {
		key, value, ok := strings.Cut(line, ":")
		if value = strings.TrimSpace(value); ok && strings.TrimSpace(key) == "Token" && digits(value) {
			return value
		}
	}
	return ""
}

// parseLabel returns the token in the rules of our anchor, "" if there is none.
func parseLabel(rules string) string {
	_, rest, ok := strings.Cut(rules, tokenLabel)
	if !ok {
		return ""
	}
	end := strings.IndexFunc(rest, func(r rune) bool { return r < '0' || r > '9' })
	if end < 0 {
		end = len(rest)
	}
	return rest[:end]
}

func digits(s string) bool {
	return s != "" && len(s) <= 20 && strings.Trim(s, "0123456789") == ""
}

func (m *mac) setFilter(ctx context.Context, c host.Change) error {
	if len(c.Addresses) == 0 {
		return m.removeFilter(ctx) // nothing to protect; the rules hold the token
	}
	rules, err := m.run.Run(ctx, "pfctl", "-a", anchor, "-s", "rules")
	if err != nil {
		return err
	}
	token := parseLabel(string(rules))
	if token != "" {
		off, err := m.filterOff(ctx)
		if err != nil {
			return err
		}
		if off {
			// The token counts no more, or it counts for nothing: either way it is
			// given back, and another one taken.
			_, _ = m.run.Run(ctx, "pfctl", "-X", token)
			token = ""
		}
	}
	made := false
	if token == "" {
		out, err := m.run.Run(ctx, "pfctl", "-E")
		if err != nil {
			return err
		}
		if token = parseToken(string(out)); token == "" {
			return fmt.Errorf("pfctl -E gave no token: %q", out)
		}
		made = true
	}
	if _, err := m.run.Run(ctx, "sh", "-c", load, "sh", filterRules(c, token)); err != nil {
		if made {
			_, undone := m.run.Run(ctx, "pfctl", "-X", token)
			err = errors.Join(err, undone)
		}
		return err
	}
	return nil
}

// filterOff reports whether the packet filter is switched off as a whole, as
// `pfctl -d` does, whoever still wants it.
func (m *mac) filterOff(ctx context.Context) (bool, error) {
	info, err := m.run.Run(ctx, "pfctl", "-s", "info")
	if err != nil {
		return false, err
	}
	return parseOff(string(info)), nil
}

// parseOff reads "Status: Disabled for 0 days 00:00:12" among what `pfctl -s
// info` prints (pfctl(8)).
func parseOff(info string) bool {
	for line := range strings.Lines(info) {
		if f := strings.Fields(line); len(f) >= 2 && f[0] == "Status:" {
			return f[1] == "Disabled"
		}
	}
	return false
}

// Lacks implements host.Host: our rules are there where their label is.
func (m *mac) Lacks(ctx context.Context, c host.Change) (string, error) {
	if c.Kind != host.ChangeFilter || len(c.Addresses) == 0 {
		return "", nil
	}
	rules, err := m.run.Run(ctx, "pfctl", "-a", anchor, "-s", "rules")
	if err != nil {
		return "", err
	}
	if parseLabel(string(rules)) == "" {
		return "the anchor " + anchor + " has no rules of ours", nil
	}
	off, err := m.filterOff(ctx)
	if err != nil {
		return "", err
	}
	if off {
		return "pf is switched off", nil
	}
	return "", nil
}

func (m *mac) removeFilter(ctx context.Context) error {
	rules, err := m.run.Run(ctx, "pfctl", "-a", anchor, "-s", "rules")
	if err != nil {
		return err
	}
	if strings.TrimSpace(string(rules)) == "" {
		return nil
	}
	if _, err := m.run.Run(ctx, "pfctl", "-q", "-a", anchor, "-F", "rules"); err != nil {
		return err
	}
	if token := parseLabel(string(rules)); token != "" {
		_, err = m.run.Run(ctx, "pfctl", "-X", token)
	}
	return err
}
