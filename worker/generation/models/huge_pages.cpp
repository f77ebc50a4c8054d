#include "worker/generation/models/huge_pages.h"

#include <sys/mman.h>

#include <fstream>
#include <iterator>
#include <string>

namespace bulkhead::worker::generation {
namespace {

constexpr std::uint64_t page_bytes = 2 << 20;

/// "always [madvise] never": the kernel's choice stands in brackets.
bool are_given() {
    std::ifstream file{"/sys/kernel/mm/transparent_hugepage/enabled"};
    const std::string text{std::istreambuf_iterator<char>{file}, {}};
    return !text.empty() && text.find("[never]") == std::string::npos;
}

}  // namespace

std::optional<HugePages> HugePages::reserve(std::uint64_t bytes) {
    if (!are_given()) return {};
    const std::uint64_t reserved = bytes + page_bytes;
    void* const address =
        ::mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED) return {};
    const std::span mapping{static_cast<std::byte*>(address), reserved};
    const std::uint64_t past = reinterpret_cast<std::uintptr_t>(address) % page_bytes;
    HugePages made{mapping, mapping.subspan(past == 0 ? 0 : page_bytes - past, bytes)};
    if (::madvise(address, reserved, MADV_HUGEPAGE) != 0) return {};
    (void)::madvise(address, reserved, MADV_DONTDUMP);  // if refused, a core holds the weights too
    return made;
}

HugePages::~HugePages() {
    if (!mapping_.empty()) ::munmap(mapping_.data(), mapping_.size());
}

}  // namespace bulkhead::worker::generation
