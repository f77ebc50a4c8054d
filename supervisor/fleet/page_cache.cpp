#include "supervisor/fleet/page_cache.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>

#include "ipc/base/file_identity.h"
#include "ipc/base/mapping.h"
#include "ipc/base/unique_fd.h"
#include "supervisor/base/limits.h"

namespace bulkhead::supervisor {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t slice_bytes = 8 << 20;  ///< requested as a whole if any page of it is missing

/// Adds the regular files of a folder; with a recursive iterator, those of its subfolders too.
template <typename Iterator>
std::vector<fs::path> files_in(const fs::path& folder) {
    std::vector<fs::path> files;
    std::error_code failed;
    for (Iterator entry{folder, failed}, end; !failed && entry != end && files.size() < limits::package_files_max;
         entry.increment(failed))
        if (std::error_code ignored; entry->is_regular_file(ignored)) files.push_back(entry->path());
    return files;
}

void read_ahead_file(const fs::path& path, std::uint64_t& read_left, CachedFiles& all) {
    const UniqueFd fd{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK)};
    struct stat status {};
    if (!fd || ::fstat(fd.get(), &status) != 0 || !S_ISREG(status.st_mode)) return;
    const auto size = static_cast<std::uint64_t>(status.st_size);
    const Mapping file{size, PROT_READ, MAP_SHARED, fd.get()};
    if (!file) return;
    for (std::uint64_t at = 0; at < size; at += slice_bytes) {
        const std::uint64_t bytes = std::min(slice_bytes, size - at);
        const std::uint64_t cached = cached_bytes(file.bytes().subspan(at, bytes));
        all.bytes += bytes;
        all.cached += cached;
        if (cached == bytes || read_left < bytes) continue;
        read_left -= bytes;
        (void)::posix_fadvise(fd.get(), static_cast<off_t>(at), static_cast<off_t>(bytes), POSIX_FADV_WILLNEED);
    }
}

}  // namespace

std::vector<fs::path> weight_files(const config::ModelSpec& model, const fs::path& package_cache) {
    std::error_code failed;
    if (fs::is_directory(model.file, failed)) return files_in<fs::directory_iterator>(model.file);
    struct stat status {};
    if (::stat(model.file.c_str(), &status) != 0) return {};
    if (model.runtime != config::Runtime::aoti) return {model.file};
    const fs::path unpacked = package_cache / "by-file" / file_identity(status);
    return files_in<fs::recursive_directory_iterator>(fs::canonical(unpacked, failed));
}

CachedFiles read_ahead(const std::vector<fs::path>& files, std::uint64_t read_max) {
    CachedFiles all;
    for (const fs::path& file : files) read_ahead_file(file, read_max, all);
    return all;
}

}  // namespace bulkhead::supervisor
