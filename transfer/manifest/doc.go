// Package manifest says what there is to copy: it walks the sources, applies
// filters, and lists every file, directory and symlink with what is to be
// preserved. It opens no file.
//
// What cannot be copied (device nodes, sockets, symlinks that lead out of the
// copied tree) is reported and left out; the rest goes on.
package manifest
