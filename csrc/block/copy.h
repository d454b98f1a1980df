// Moves payload bytes between memory that other threads or processes may be using.
//
// A reader copies a slot while the node may be giving it to another block. That race is intended:
// the generation of the block, read again after the copy, decides whether the bytes count. C++ has
// no bytewise atomic copy, so the shared side is touched by inline assembly, where the machine's
// rules hold (loads and stores of any bytes are defined, torn or not), and by relaxed atomic words
// where there is no assembly or where TSan must see what happens.
//
// Relies on: ranges of one call do not overlap.
// Promises:  exactly the bytes asked for are read and written; fast at any alignment. libc memcpy
//            is not used: it turns to string instructions, which lose a factor of two when the
//            destination is not on a cache line, as big numpy arrays never are (16 bytes past one).
// No call orders anything: use the fences below. Thread-safe.
#pragma once
#include <atomic>
#include <cstddef>

namespace kvpool {

// For readers: `src` may be overwritten meanwhile; `dst` is private to the caller.
void racy_copy(void* dst, const void* src, std::size_t bytes);

// For writers of memory that readers may still be copying from: `dst` is shared, `src` private.
void racy_fill(void* dst, const void* src, std::size_t bytes);

// As racy_fill, with non-temporal stores: for bytes that this core will not read again soon, into
// memory that is not in its cache. Half again as fast there; best with `dst` on 64 bytes. The
// stores are weakly ordered: fence_before_publish() must come before anything that announces them.
void stream_fill(void* dst, const void* src, std::size_t bytes);

// `count` runs of equal length, each a step away from the one before on its side.
struct Runs {
  std::size_t bytes = 0;
  std::size_t count = 0;
  std::ptrdiff_t dst_step_bytes = 0;
  std::ptrdiff_t src_step_bytes = 0;
};
void racy_copy_runs(void* dst, const void* src, const Runs& runs);
void racy_fill_runs(void* dst, const void* src, const Runs& runs);

// Between "this slot is no longer readable" and the first byte written into it. On x86 a release
// fence costs nothing and orders ordinary stores only; non-temporal and string stores may pass an
// earlier ordinary one, hence the instruction.
inline void fence_before_overwrite() {
  std::atomic_thread_fence(std::memory_order_release);
#if defined(__x86_64__)
  asm volatile("sfence" ::: "memory");
#endif
}

// Between the last byte written and the (release) store that makes it readable.
inline void fence_before_publish() {
  std::atomic_thread_fence(std::memory_order_release);
#if defined(__x86_64__)
  asm volatile("sfence" ::: "memory");
#endif
}

}  // namespace kvpool
