#include "worker/model/read_ahead.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "ipc/base/mapping.h"
#include "ipc/base/unique_fd.h"
#include "worker/model/load_limits.h"

namespace bulkhead::worker {
namespace {

namespace fs = std::filesystem;

/// A file's pages, mapped to be asked about, never touched.
class Pages {
public:
    Pages(int fd, std::uint64_t bytes) : mapping_{bytes, PROT_READ, MAP_SHARED, fd} {}

    [[nodiscard]] bool in_memory(std::uint64_t offset, std::size_t count) {
        static const auto page_bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
        resident_.resize((count + page_bytes - 1) / page_bytes);
        return mapping_ && ::mincore(mapping_.bytes().data() + offset, count, resident_.data()) == 0 &&
               std::ranges::all_of(resident_, [](unsigned char state) { return (state & 1) != 0; });
    }

private:
    Mapping mapping_;
    std::vector<unsigned char> resident_;
};

}  // namespace

void read_ahead(const fs::path& folder, const std::function<void(std::uint64_t, std::uint64_t)>& progress) {
    std::vector<std::pair<fs::path, std::uint64_t>> files;
    std::uint64_t total = 0;
    std::error_code error;
    for (const auto& item : fs::recursive_directory_iterator{folder, error}) {
        const std::uint64_t bytes = item.is_regular_file(error) ? item.file_size(error) : 0;
        if (error || bytes == 0) continue;
        files.emplace_back(item.path(), bytes);
        total += bytes;
    }
    std::vector<std::byte> chunk(limits::io_chunk_bytes);
    std::uint64_t done = 0;
    progress(0, total);
    for (const auto& [path, bytes] : files) {
        const UniqueFd file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW)};
        Pages pages{file.get(), bytes};
        for (std::uint64_t offset = 0; offset < bytes; offset += chunk.size()) {
            const std::size_t count = std::min<std::uint64_t>(chunk.size(), bytes - offset);
            if (!pages.in_memory(offset, count))
                (void)!::pread(file.get(), chunk.data(), count, static_cast<off_t>(offset));
            progress(done += count, total);
        }
    }
}

}  // namespace bulkhead::worker
