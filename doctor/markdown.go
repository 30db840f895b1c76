package doctor

import (
	"bytes"
	"fmt"
	"strings"

	tbclusterv1 "tbcluster/api/tbcluster/v1"
)

//go:generate go run ./generate ../docs/findings.md

var severityWords = map[tbclusterv1.Severity]string{
	info:    "info",
	warning: "warning",
	failure: "error",
}

// Markdown returns docs/findings.md.
func Markdown() []byte {
	var b bytes.Buffer
	b.WriteString(`<!-- Made from the catalogue in package doctor by "go generate ./doctor". -->

# Findings

What ` + "`tbcluster doctor`" + `, the status and the terminal UI may tell you, by code. Words in braces are filled from what was seen.

- **error**: something is broken. **warning**: a person should look at it. **info**: worth knowing.

| code | severity | what it says |
|---|---|---|
`)
	for _, e := range Catalogue() {
		fmt.Fprintf(&b, "| [%s](#%s) | %s | %s |\n", e.Code, e.Code, severityWords[e.Severity], e.Title)
	}
	b.WriteString("\n")
	for _, e := range Catalogue() {
		fmt.Fprintf(&b, "## %s\n\n*%s*: %s\n\n%s\n\n**What to do.** %s\n\n", e.Code, severityWords[e.Severity], e.Title, e.Meaning, strings.ReplaceAll(e.Fix, "\n", " "))
	}
	return append(bytes.TrimRight(b.Bytes(), "\n"), '\n')
}
