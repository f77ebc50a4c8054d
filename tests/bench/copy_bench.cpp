// The copy by which weights reach pinned buffers, beside one memcpy of the same bytes by one core:
// a mapped file that lies in the page cache, through a ring of slots as worker/cuda/host_memory.cpp
// fills it. Without a GPU: nobody waits for a bus.

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

#include <fmt/format.h>

#include "tests/bench/placement.h"
#include "tests/bench/record.h"
#include "worker/model/parallel_copy.h"

namespace bulkhead::bench::copy_bench {
namespace {

constexpr std::size_t weights_bytes = std::size_t{512} << 20;
constexpr std::size_t slots = 4;
constexpr int rounds = 7;

/// Mapped again for each copy, as a model's file is for each load: its pages are in the cache, and
/// in no page table.
class File {
public:
    File() : fd_{::memfd_create("bench-weights", MFD_CLOEXEC)} {
        if (fd_ < 0 || ::ftruncate(fd_, weights_bytes) != 0) throw std::runtime_error{"no memory for the weights"};
        const Mapping all{fd_, PROT_READ | PROT_WRITE};
        std::memset(all.bytes, 1, weights_bytes);
    }
    ~File() { ::close(fd_); }
    File(const File&) = delete;

    template <typename Body>
    double copied_by(Body&& body) const {
        const Mapping mapping{fd_, PROT_READ};
        return microseconds([&] { body(std::span<const std::byte>{mapping.bytes, weights_bytes}); });
    }

private:
    struct Mapping {
        Mapping(int fd, int access)
            : bytes{static_cast<std::byte*>(::mmap(nullptr, weights_bytes, access, MAP_SHARED, fd, 0))} {
            if (bytes == MAP_FAILED) throw std::runtime_error{"no addresses for the weights"};
        }
        ~Mapping() { ::munmap(bytes, weights_bytes); }
        Mapping(const Mapping&) = delete;
        std::byte* bytes;
    };
    int fd_;
};

Records run() {
    Records records;
    const File file;
    std::vector<std::byte> whole(weights_bytes);  // touched here: pinned memory is, too
    const auto cores = static_cast<int>(allowed_cpus().size());
    const auto one_memcpy = [&] {
        return file.copied_by([&](auto from) { std::memcpy(whole.data(), from.data(), from.size()); });
    };
    for (const int threads : {1, std::min(8, cores), 8}) {
        worker::ParallelCopy copy{threads};
        for (const std::size_t slot : {std::size_t{4} << 20, std::size_t{16} << 20, std::size_t{32} << 20}) {
            const auto through_ring = [&] {
                return file.copied_by([&](std::span<const std::byte> from) {
                    for (std::size_t turn = 0; !from.empty(); ++turn) {
                        const auto chunk = from.first(std::min(slot, from.size()));
                        copy(whole.data() + turn % slots * slot, chunk);
                        from = from.subspan(chunk.size());
                    }
                });
            };
            const Pair pair = interleaved(rounds, through_ring, one_memcpy);
            const double gib = static_cast<double>(weights_bytes) / (1 << 30);
            records.push_back({fmt::format("{} threads of {} cores, {} slots of {} MiB", threads, cores, slots, slot >> 20),
                               gib * 1e6 / pair.value, "GiB/s", "one memcpy", gib * 1e6 / pair.baseline});
        }
    }
    return records;
}

const Bench bench{"copy", "weights from a mapped file into a ring of buffers, against one memcpy", run};

}  // namespace
}  // namespace bulkhead::bench::copy_bench
