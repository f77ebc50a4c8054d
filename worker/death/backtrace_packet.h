#pragma once

#include <string_view>

namespace bulkhead::worker {

/// Prepares what `backtrace_packet` needs before any failure: its pipe, and the unwinder, which its
/// first use loads.
void prepare_backtrace() noexcept;

/// Returns `{"type":"backtrace","signal","thread","frames"}` of the calling thread, innermost frame
/// (`fault`) first. The text is in static memory: call it once per process.
///
/// Thread  any, in a signal handler; allocates nothing and waits only for the dynamic linker's lock
[[nodiscard]] std::string_view backtrace_packet(int signal, const void* fault) noexcept;

}  // namespace bulkhead::worker
