// What this processor can do beyond the baseline the build targets.
//
// Asked once per process and never changed, so a choice of kernel made from it holds for good.
// Thread-safe. All false on processors other than x86-64.
#pragma once

namespace kvpool {

struct CpuFeatures {
  bool avx2 = false;    // and the operating system saves the 256-bit registers
  bool avx512 = false;  // F, BW, DQ and VL, and the operating system saves the 512-bit registers
  bool fast_strings = false;  // rep movsb moves whole lines
  bool sha = false;           // SHA-256 rounds, with the SSE4.1 shuffles that feed them
};

const CpuFeatures& cpu_features();

}  // namespace kvpool
