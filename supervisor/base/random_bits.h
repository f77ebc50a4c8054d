#pragma once

#include <unistd.h>

#include <cstdint>

namespace bulkhead::supervisor {

/// 64 random bits of the kernel. Linked statically, std::random_device would need glibc 2.36.
inline std::uint64_t random_bits() noexcept {
    std::uint64_t bits = 0;
    (void)::getentropy(&bits, sizeof bits);  // fails before Linux 3.17 alone
    return bits;
}

}  // namespace bulkhead::supervisor
