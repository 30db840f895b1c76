package main

import (
	"fmt"
	"io"
	"strings"
	"unicode/utf8"
)

// table prints rows in columns two spaces apart, without trailing spaces. Its
// cells are made safe to print.
type table struct {
	rows  [][]string
	right map[int]bool
}

// newTable returns a table with that heading. A heading that ends in ">" makes
// its column right-aligned, as numbers should be.
func newTable(heading ...string) *table {
	t := &table{right: map[int]bool{}}
	for i, h := range heading {
		if cut, ok := strings.CutSuffix(h, ">"); ok {
			heading[i], t.right[i] = cut, true
		}
	}
	t.add(heading...)
	return t
}

// add appends a row.
func (t *table) add(cells ...string) {
	row := make([]string, len(cells))
	for i, c := range cells {
		row[i] = plain(c)
	}
	t.rows = append(t.rows, row)
}

// write prints the table.
func (t *table) write(w io.Writer) {
	var width []int
	for _, row := range t.rows {
		for i, c := range row {
			if i == len(width) {
				width = append(width, 0)
			}
			width[i] = max(width[i], utf8.RuneCountInString(c))
		}
	}
	for _, row := range t.rows {
		var b strings.Builder
		for i, c := range row {
			pad := strings.Repeat(" ", width[i]-utf8.RuneCountInString(c))
			if i > 0 {
				b.WriteString("  ")
			}
			if t.right[i] {
				b.WriteString(pad + c)
			} else {
				b.WriteString(c + pad)
			}
		}
		fmt.Fprintln(w, strings.TrimRight(b.String(), " "))
	}
}
