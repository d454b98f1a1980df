"""KV events over ZMQ: what a pool holds, for routers that follow it (docs/events.md).

node's changes -> runs -> encoding -> publisher -> subscribers
                                         |
                              history, answers: what was missed, or all of it
"""
