// Command generate writes docs/findings.md from the catalogue of package
// doctor.
package main
