package main

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"tbcluster/agent/config"
	"tbcluster/api/fault"
)

func newConfigCommand(g *globals) *cobra.Command {
	file := ""
	cmd := &cobra.Command{
		Use:     "config",
		Short:   "Show the settings and what they mean",
		GroupID: groupOther,
		Long: `Nothing has to be configured. There may be one file, /etc/tbcluster/config.toml
where the agent runs as root, else ~/.config/tbcluster/config.toml; the agent
reads it when it starts.` + exitHelpAlone(fault.ConfigInvalid),
	}
	show := &cobra.Command{
		Use:   "show",
		Short: "Show every key with its value, its default and its meaning",
		Long: `Prints a whole configuration file: every key with what it means, as a comment
where the value is the default. What is printed can be used as the file (API keys
are not shown). A key that is not known, or a value that cannot be used, is an
error with its line.` + exitHelpAlone(fault.ConfigInvalid),
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              func(*cobra.Command, []string) error { return runConfigShow(g, configPath(g, file)) },
	}
	path := &cobra.Command{
		Use:               "path",
		Short:             "Print where the configuration file is looked for",
		Long:              `Prints the path, whether or not a file is there.` + exitHelpAlone(),
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              func(*cobra.Command, []string) error { return runConfigPath(g, configPath(g, file)) },
	}
	show.Flags().StringVar(&file, "file", "", "another file than the usual one")
	cmd.AddCommand(show, path)
	return cmd
}

// configPath returns the file that the caller's agent reads: that of root where
// the machine has an agent that runs as root, whoever asks.
func configPath(g *globals, file string) string {
	if file != "" {
		return file
	}
	if _, err := os.Stat(machineSocket(g)); err == nil {
		return config.Path(0, g.getenv)
	}
	return config.Path(os.Getuid(), g.getenv)
}

// homeText writes a path below the caller's home as people do.
func homeText(g *globals, path string) string {
	home := g.getenv("HOME")
	if !filepath.IsAbs(home) || home == "/" {
		return path
	}
	if rest, ok := strings.CutPrefix(path, filepath.Clean(home)+"/"); ok {
		return "~/" + rest
	}
	return path
}

// configJSON is `tbcluster config show -o json`.
type configJSON struct {
	Path   string          `json:"path"`
	Exists bool            `json:"exists"`
	Keys   []configKeyJSON `json:"keys"`
}

type configKeyJSON struct {
	Name    string `json:"name"`
	Kind    string `json:"kind"`
	Value   string `json:"value"`
	Default string `json:"default"`
	Changed bool   `json:"changed"`
	Meaning string `json:"meaning"`
}

func runConfigShow(g *globals, path string) error {
	c, err := config.Load(path)
	if err != nil {
		return err
	}
	_, statErr := os.Stat(path)
	exists := !errors.Is(statErr, fs.ErrNotExist)
	if g.json() {
		out := configJSON{Path: path, Exists: exists, Keys: mapped(config.Keys, func(k config.Key) configKeyJSON {
			v := c.Value(k.Name)
			return configKeyJSON{k.Name, k.Kind, v, k.Default, v != k.Default, k.Meaning}
		})}
		writeJSON(g.out, out)
		return nil
	}
	if !exists {
		g.printf("# %s does not exist, and need not: every value is the default.\n", plain(homeText(g, path)))
	} else {
		g.printf("# %s\n", plain(homeText(g, path)))
	}
	writeConfig(g.out, c)
	return nil
}

// writeConfig prints c as a file with every key explained.
func writeConfig(w io.Writer, c config.Config) {
	for _, k := range config.Keys {
		value := c.Value(k.Name)
		var b strings.Builder
		b.WriteString("\n")
		for _, line := range wrap(k.Meaning, 76) {
			b.WriteString("# " + line + "\n")
		}
		b.WriteString("# " + k.Kind + "; default " + k.Default + "\n")
		if value == k.Default {
			b.WriteString("# ")
		}
		b.WriteString(k.Name + " = " + plain(value) + "\n")
		io.WriteString(w, b.String())
	}
}

// wrap breaks s at spaces into lines of at most width characters.
func wrap(s string, width int) []string {
	var lines []string
	line := ""
	for _, word := range strings.Fields(s) {
		if line != "" && len(line)+1+len(word) > width {
			lines = append(lines, line)
			line = ""
		}
		if line != "" {
			line += " "
		}
		line += word
	}
	return append(lines, line)
}

func runConfigPath(g *globals, path string) error {
	if g.json() {
		writeJSON(g.out, struct {
			Path string `json:"path"`
		}{path})
		return nil
	}
	g.printf("%s\n", path)
	return nil
}
