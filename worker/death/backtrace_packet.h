#pragma once

#include <string_view>

namespace bulkhead::worker {

/// Makes, while all is well, what `backtrace_packet` needs: its pipe, and the unwinder, which the first use loads.
void prepare_backtrace() noexcept;

/// `{"type":"backtrace","signal","thread","frames"}` of the calling thread, from the place `fault` inwards to outwards.
/// In static memory: once in a life of a process.
///
/// Thread  any, inside a signal handler; allocates nothing, waits for nothing but the dynamic linker's lock
[[nodiscard]] std::string_view backtrace_packet(int signal, const void* fault) noexcept;

}  // namespace bulkhead::worker
