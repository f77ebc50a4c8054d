#pragma once

#include <string>
#include <string_view>

namespace bulkhead::cli {

/// A frame of a crash report, "_ZN4evil3runEv+0x12 (evil.so)", with its symbol demangled and then cut to
/// `demangled_bytes_max`. The daemon leaves long symbols to us: one may stand for exponentially more text than it has,
/// and it is a worker's word. So it is demangled in a process of its own, which ends after `demangling` of CPU time;
/// then the frame stays as it is.
[[nodiscard]] std::string demangled_frame(std::string_view frame);

}  // namespace bulkhead::cli
