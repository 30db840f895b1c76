# tbcluster: `make up` shows what it is, `make test` says whether it works.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build
.PHONY: up rig rig-programs build packages install uninstall test test-unit test-e2e test-limits test-rig test-systemd bench-rig test-rig-long test-long lint cross gen deps clean

VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
PREFIX ?= /usr/local
RUN := scripts/go
TEST := $(RUN) gotestsum --format pkgname --

# Packages whose tests boot virtual machines.
GUESTS := ./rig ./rig/image ./rig/guest ./rig/cluster ./cmd/tbcluster-rig

# The tests of a package mostly wait: four packages at a time are what two cores
# and a few GiB of memory bear.
RACE := -race -p 4

up: ## build, make a virtual cluster, copy a model over a cable, run it, ask it
	@scripts/deps up
	@$(MAKE) --no-print-directory build
	bin/tbcluster up --lab 3 --demo

rig: ## two virtual machines with a real kernel's thunderbolt driver, an emulated cable, and tbcluster on both
	@scripts/deps rig
	@$(MAKE) --no-print-directory build rig-programs
	bin/tbcluster-rig up --once --cluster bin/tbcluster

rig-programs:
	@CGO_ENABLED=0 $(RUN) go build -trimpath -ldflags '-s -w' -o bin/ ./cmd/tbcluster-rig ./rig/guest/guestd ./rig/probe

build: ## bin/tbcluster, static
	@scripts/deps build
	@mkdir -p bin
	@[ -x bin/tbcluster ] || echo "building bin/tbcluster; the first time takes a few minutes"
	@CGO_ENABLED=0 $(RUN) go build -trimpath -ldflags '-s -w -X main.version=$(VERSION)' -o bin/tbcluster ./cmd/tbcluster
	@echo "bin/tbcluster $(VERSION)"

packages: ## deb, rpm and archives for macOS into dist/; the same commit gives the same bytes
	@scripts/deps packages
	@scripts/packages dist

install: ## into PREFIX (/usr/local), under DESTDIR; what is built already is taken as it is
	@[ -x bin/tbcluster ] || $(MAKE) --no-print-directory build
	install -D -m 755 bin/tbcluster '$(DESTDIR)$(PREFIX)/bin/tbcluster'
	bin/tbcluster man '$(DESTDIR)$(PREFIX)/share/man/man1'
	@mkdir -p '$(DESTDIR)$(PREFIX)/share/bash-completion/completions' '$(DESTDIR)$(PREFIX)/share/zsh/site-functions' '$(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d'
	bin/tbcluster completion bash > '$(DESTDIR)$(PREFIX)/share/bash-completion/completions/tbcluster'
	bin/tbcluster completion zsh > '$(DESTDIR)$(PREFIX)/share/zsh/site-functions/_tbcluster'
	bin/tbcluster completion fish > '$(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/tbcluster.fish'

uninstall: ## what install put there
	rm -f '$(DESTDIR)$(PREFIX)/share/man/man1/tbcluster.1' '$(DESTDIR)$(PREFIX)'/share/man/man1/tbcluster-*.1
	rm -f '$(DESTDIR)$(PREFIX)/bin/tbcluster' '$(DESTDIR)$(PREFIX)/share/bash-completion/completions/tbcluster' \
		'$(DESTDIR)$(PREFIX)/share/zsh/site-functions/_tbcluster' '$(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/tbcluster.fish'

test: ## everything that a change has to pass
	@scripts/phases deps lint cross test-unit test-e2e test-rig test-limits

test-unit:
	@$(TEST) $(RACE) -timeout 8m $$($(RUN) go list ./... | grep -v -E '^tbcluster/(e2e|rig|rig/guest|rig/image|rig/cluster|cmd/tbcluster-rig)$$')
	@$(TEST) $(RACE) -timeout 8m -short ./rig ./rig/cluster ./cmd/tbcluster-rig

test-e2e: ## the real program on a virtual cluster with a real model
	@$(TEST) -count=1 -timeout 10m -parallel 3 -skip '^TestLimit' ./e2e

test-rig: ## the real driver of real kernels in virtual machines; builds those the first time
	@$(TEST) -count=1 -timeout 30m -p 1 -parallel 2 -skip '^TestSystemd$$' $(GUESTS)

test-systemd: ## the packages and units on a virtual machine with systemd, NetworkManager and systemd-networkd
	@$(TEST) -count=1 -timeout 20m -run '^TestSystemd$$' ./rig/cluster

bench-rig: ## raw rings between two guests, on a machine that does nothing else; TBCLUSTER_BENCH_PEER is another emulator to compare with
	@TBCLUSTER_BENCH=1 $(RUN) go test -count=1 -v -timeout 30m -run '^TestRingBench$$' ./rig

test-rig-long: ## a thousand random steps on the debug kernel, in runs of a hundred; TBCLUSTER_RIG_SEED is the first seed
	@TBCLUSTER_LONG=1 $(RUN) go test -count=1 -v -timeout 1h -run '^TestTheDebugKernelFindsFaults$$' ./rig/guest
	@TBCLUSTER_LONG=1 TBCLUSTER_RIG_SUMMARY=$(CURDIR)/docs/rig-walks.md $(RUN) go test -count=1 -v -timeout 12h -run '^TestWalkLong$$' ./rig

test-limits: build ## times, sizes and loads that are promised; alone on the machine
	@TBCLUSTER_LIMITS=1 TBCLUSTER_TEST_BINARY=$(CURDIR)/bin/tbcluster $(RUN) go test -C e2e -count=1 -timeout 10m -run '^TestLimit'

test-long: deps build ## hours: every test again and again, every fuzz test for a while, a thousand steps in the rig
	scripts/fuzz 60s
	TBCLUSTER_LONG=1 $(TEST) $(RACE) -count=5 -timeout 60m $$($(RUN) go list ./... | grep -v -E '^tbcluster/(rig|rig/guest|rig/image|rig/cluster|cmd/tbcluster-rig)$$')
	@$(MAKE) --no-print-directory test-systemd test-rig-long

lint: deps
	@scripts/lint

cross: ## the systems that are not this one
	@GOOS=darwin GOARCH=arm64 CGO_ENABLED=0 $(RUN) go build ./...
	@GOOS=linux GOARCH=arm64 CGO_ENABLED=0 $(RUN) go build ./...

gen: deps ## the Go of api/ from its protos
	cd api && ../$(RUN) buf generate

deps:
	@scripts/deps test

clean:
	rm -rf bin dist
