#include "worker/parallel_copy.h"

#include <algorithm>
#include <cstring>

namespace bulkhead::worker {
namespace {

constexpr std::size_t shared_bytes_min = 256 << 10;  ///< less is copied before a helper wakes

}  // namespace

ParallelCopy::ParallelCopy(std::ptrdiff_t threads) : begin_{threads}, end_{threads} {
    for (std::size_t part = 1; part < static_cast<std::size_t>(threads); ++part)
        helpers_.emplace_back([this, part] {
            for (;;) {
                begin_.arrive_and_wait();
                if (from_.empty()) return;
                copy_part(part);
                end_.arrive_and_wait();
            }
        });
}

ParallelCopy::~ParallelCopy() {
    from_ = {};
    begin_.arrive_and_wait();
}

void ParallelCopy::operator()(std::byte* to, std::span<const std::byte> from) {
    if (from.size() < shared_bytes_min || helpers_.empty()) {
        if (!from.empty()) std::memcpy(to, from.data(), from.size());
        return;
    }
    to_ = to;
    from_ = from;
    begin_.arrive_and_wait();
    copy_part(0);
    end_.arrive_and_wait();
}

void ParallelCopy::copy_part(std::size_t part) const {
    const std::size_t size = from_.size() / (helpers_.size() + 1);
    const std::size_t first = part * size;
    const std::size_t count = part == helpers_.size() ? from_.size() - first : size;
    std::memcpy(to_ + first, from_.data() + first, count);
}

}  // namespace bulkhead::worker
