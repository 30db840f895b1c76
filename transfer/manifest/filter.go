package manifest

import (
	"fmt"
	"strings"

	"tbcluster/api/fault"
)

// Filter holds rules in rsync's order: the first whose pattern fits decides,
// and what fits none is copied. The zero value copies everything.
//
// A pattern that begins with a slash fits from the source's top; one with a
// slash elsewhere (or with "**") fits the end of the path, component by
// component; any other fits the last component. One that ends in a slash fits
// directories only. "*" and "?" stop at slashes, "**" does not, "[a-z]" and
// "[!a-z]" are sets, "\" takes the next character as it is, and "dir/***" is
// "dir/" with all that is in it.
type Filter struct{ rules []rule }

type rule struct {
	include  bool
	pattern  string
	anchored bool // from the top
	whole    bool // against the path's end, not the last component alone
	dirOnly  bool
	subtree  string // "dir" of "dir/***": dir itself fits as well
}

// ParseFilter reads rules of the form "+PATTERN" or "-PATTERN"; a space may
// follow the sign.
func ParseFilter(rules []string) (Filter, error) {
	var f Filter
	for _, s := range rules {
		if len(s) < 2 || s[0] != '+' && s[0] != '-' {
			return Filter{}, fault.Newf(fault.Usage, "write +PATTERN to include or -PATTERN to exclude", "filter %q is not right", s)
		}
		p := strings.TrimPrefix(s[1:], " ")
		r := rule{include: s[0] == '+'}
		if strings.HasPrefix(p, "/") {
			r.anchored, p = true, p[1:]
		}
		if dir, ok := strings.CutSuffix(p, "/***"); ok && dir != "" {
			r.subtree, p = dir, dir+"/**"
		} else if strings.HasSuffix(p, "/") {
			r.dirOnly, p = true, strings.TrimRight(p, "/")
		}
		if p == "" {
			return Filter{}, fault.Newf(fault.Usage, "name what to include or exclude", "filter %q has no pattern", s)
		}
		if strings.Count(p, "*") > 32 {
			return Filter{}, fault.Newf(fault.Usage, "use fewer stars", "filter %q has too many stars", s)
		}
		r.pattern = p
		r.whole = strings.Contains(p, "/") || strings.Contains(p, "**")
		if err := checkPattern(p); err != nil {
			return Filter{}, fault.Newf(fault.Usage, "close the bracket, or write \\[ for the character", "filter %q is not right: %v", s, err)
		}
		f.rules = append(f.rules, r)
	}
	return f, nil
}

// Copies reports whether the path, relative to the transfer's top, is copied.
func (f Filter) Copies(path string, dir bool) bool {
	for _, r := range f.rules {
		if r.fits(path, dir) {
			return r.include
		}
	}
	return true
}

func (r rule) fits(path string, dir bool) bool {
	if r.subtree != "" && dir && r.match(r.subtree, path, r.anchored, strings.Contains(r.subtree, "/")) {
		return true
	}
	if r.dirOnly && !dir {
		return false
	}
	return r.match(r.pattern, path, r.anchored, r.whole)
}

func (r rule) match(pattern, path string, anchored, whole bool) bool {
	if anchored {
		return glob(pattern, path)
	}
	if !whole {
		return glob(pattern, path[strings.LastIndexByte(path, '/')+1:])
	}
	for {
		if glob(pattern, path) {
			return true
		}
		_, rest, ok := strings.Cut(path, "/")
		if !ok {
			return false
		}
		path = rest
	}
}

// glob matches the whole of s. Only the last "*" and the last "**" seen are
// gone back to, which is enough, for what an earlier one could take a later one
// can; it keeps the time within len(pattern)·len(s)².
func glob(pattern, s string) bool {
	type back struct{ p, s int }
	star, deep := back{-1, 0}, back{-1, 0}
	p, i := 0, 0
	for {
		if p < len(pattern) && pattern[p] == '*' {
			if strings.HasPrefix(pattern[p:], "**") {
				for p < len(pattern) && pattern[p] == '*' {
					p++
				}
				deep, star = back{p, i}, back{-1, 0}
			} else {
				p++
				star = back{p, i}
			}
			continue
		}
		if p == len(pattern) && i == len(s) {
			return true
		}
		if p < len(pattern) && i < len(s) {
			if n := one(pattern[p:], s[i]); n > 0 {
				p, i = p+n, i+1
				continue
			}
		}
		switch {
		case star.p >= 0 && star.s < len(s) && s[star.s] != '/':
			star.s++
			p, i = star.p, star.s
		case deep.p >= 0 && deep.s < len(s):
			deep.s++
			p, i = deep.p, deep.s
			star = back{-1, 0}
		default:
			return false
		}
	}
}

// one returns how many bytes of pattern match the byte c, 0 if it does not.
func one(pattern string, c byte) int {
	switch pattern[0] {
	case '?':
		if c == '/' {
			return 0
		}
		return 1
	case '\\':
		if len(pattern) > 1 && pattern[1] == c {
			return 2
		}
		return 0
	case '[':
		n, ok := set(pattern, c)
		if ok && c != '/' {
			return n
		}
		return 0
	}
	if pattern[0] == c {
		return 1
	}
	return 0
}

// set returns the length of the set that pattern begins with and whether c is
// in it; length 0 when it does not end.
func set(pattern string, c byte) (int, bool) {
	i, not, in := 1, false, false
	if i < len(pattern) && (pattern[i] == '!' || pattern[i] == '^') {
		not = true
		i++
	}
	for first := true; i < len(pattern); first = false {
		if pattern[i] == ']' && !first {
			return i + 1, in != not
		}
		lo := pattern[i]
		if lo == '\\' && i+1 < len(pattern) {
			i++
			lo = pattern[i]
		}
		hi := lo
		i++
		if i+1 < len(pattern) && pattern[i] == '-' && pattern[i+1] != ']' {
			hi = pattern[i+1]
			i += 2
		}
		if lo <= c && c <= hi {
			in = true
		}
	}
	return 0, false
}

func checkPattern(p string) error {
	for i := 0; i < len(p); i++ {
		switch p[i] {
		case '\\':
			if i++; i == len(p) {
				return fmt.Errorf("a backslash at the end")
			}
		case '[':
			n, _ := set(p[i:], 0)
			if n == 0 {
				return fmt.Errorf("a set without an end")
			}
			i += n - 1
		}
	}
	return nil
}
