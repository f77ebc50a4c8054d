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

namespace fs = std::filesystem;

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
        // Only queried, never touched.
        const Mapping pages{bytes, PROT_READ, MAP_SHARED, file.get()};
        for (std::uint64_t offset = 0; offset < bytes; offset += chunk.size()) {
            const std::size_t count = std::min<std::uint64_t>(chunk.size(), bytes - offset);
            if (!pages || cached_bytes(pages.bytes().subspan(offset, count)) < count)
                (void)!::pread(file.get(), chunk.data(), count, static_cast<off_t>(offset));
            progress(done += count, total);
        }
    }
}

}  // namespace bulkhead::worker
