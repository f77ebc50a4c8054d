#include "worker/generation/models/huge_pages.h"

#include <sys/mman.h>

#include <fstream>
#include <iterator>
#include <string>

namespace bulkhead::worker::generation {
namespace {

constexpr std::uint64_t page_bytes = 2 << 20;

/// Parses "always [madvise] never": brackets mark the kernel's setting.
bool are_given() {
    std::ifstream file{"/sys/kernel/mm/transparent_hugepage/enabled"};
    const std::string text{std::istreambuf_iterator<char>{file}, {}};
    return !text.empty() && text.find("[never]") == std::string::npos;
}

}  // namespace

std::optional<HugePages> HugePages::reserve(std::uint64_t bytes) {
    if (!are_given()) return {};
    const std::uint64_t reserved = bytes + page_bytes;
    Mapping mapping{reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE};
    const std::span<std::byte> all = mapping.bytes();
    if (!mapping || ::madvise(all.data(), all.size(), MADV_HUGEPAGE) != 0) return {};
    // If refused, core files include the weights.
    (void)::madvise(all.data(), all.size(), MADV_DONTDUMP);
    const std::uint64_t past = reinterpret_cast<std::uintptr_t>(all.data()) % page_bytes;
    return HugePages{std::move(mapping), all.subspan(past == 0 ? 0 : page_bytes - past, bytes)};
}

}  // namespace bulkhead::worker::generation
