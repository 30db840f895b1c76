# Sourced by the other scripts: where downloads are kept, and which Go is used.
# Prints nothing and changes nothing but PATH.

TB_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
TB_CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/tbcluster
TB_GO_VERSION=1.26.6                       # of the wheel that scripts/deps installs
TB_GO_DIR=$TB_CACHE/go/$TB_GO_VERSION      # where it is installed

# Linters and generators, each at one version. Their directory is named after
# all of these lines, so that a change of one makes a new directory.
TB_TOOLS=(
  github.com/bufbuild/buf/cmd/buf@v1.72.0
  honnef.co/go/tools/cmd/staticcheck@v0.8.2
  gotest.tools/gotestsum@v1.13.0
  google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.12
  google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.6.2
)

# What builds deb and rpm; a directory of its own, so that only who needs it has it.
# (The versions after it want modules that their own host does not serve to the
# module proxy.)
TB_PACKAGE_TOOLS=(
  github.com/goreleaser/nfpm/v2/cmd/nfpm@v2.45.0
)

# tb_go_new_enough GO: whether that go builds this module: it is as new as
# go.mod asks for, or can and may fetch one that is.
tb_go_new_enough() {
  local want have
  want=$(awk '$1 == "go" { print $2; exit }' "$TB_ROOT/go.mod")
  # A go older than 1.21 knows nothing of toolchains and prints its own version.
  have=$(cd "$TB_ROOT" && "$1" version 2>/dev/null | awk '{ sub(/^go/, "", $3); print $3 }') || return 1
  [ -n "$have" ] && [ "$(printf '%s\n%s\n' "$want" "$have" | sort -V | head -n 1)" = "$want" ]
}

# tb_find_go: puts a go that is new enough first on PATH; false if there is none.
tb_find_go() {
  local go
  for go in "$(command -v go || true)" "$TB_GO_DIR/bin/go" /usr/local/go/bin/go; do
    if [ -n "$go" ] && [ -x "$go" ] && tb_go_new_enough "$go"; then
      PATH=$(dirname "$go"):$PATH
      return 0
    fi
  done
  return 1
}

# tb_tools_dir: where the tools are for this go and these versions.
tb_tools_dir() { tb_dir_of "${TB_TOOLS[@]}"; }
tb_package_tools_dir() { tb_dir_of "${TB_PACKAGE_TOOLS[@]}"; }
tb_dir_of() {
  echo "$TB_CACHE/tools/$(printf '%s\n' "$@" "$(go env GOOS GOARCH)" | sha256sum | cut -c1-16)"
}

# A clone that belongs to another user than the one who builds (a container, a
# mounted directory) makes git refuse, and go build with it.
export GOFLAGS="${GOFLAGS:-} -buildvcs=false"
