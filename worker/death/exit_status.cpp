#include "worker/death/exit_status.h"

#include <algorithm>
#include <fstream>
#include <string>

namespace bulkhead::worker {
namespace {

/// Whether a TorchScript file or AOTInductor package is a complete ZIP archive: a local header
/// first, and the end of the directory within the last 64 KiB (the longest comment) and 22 bytes. A
/// truncated file has lost it.
bool is_whole_archive(const std::filesystem::path& path) {
    constexpr std::streamoff tail_bytes_max = 65535 + 22;
    std::error_code missing;
    // Opening a FIFO would block.
    if (!std::filesystem::is_regular_file(path, missing)) return false;
    std::ifstream file{path, std::ios::binary | std::ios::ate};
    const std::streamoff size = file.tellg();
    std::string head(4, '\0');
    std::string tail(static_cast<std::size_t>(std::clamp<std::streamoff>(size, 0, tail_bytes_max)), '\0');
    file.seekg(0).read(head.data(), static_cast<std::streamsize>(head.size()));
    file.seekg(size - static_cast<std::streamoff>(tail.size()))
        .read(tail.data(), static_cast<std::streamsize>(tail.size()));
    return file.good() && head == "PK\x03\x04" && tail.find("PK\x05\x06") != tail.npos;
}

}  // namespace

int exit_status_of(const Error& load_error, const config::ModelSpec& model) {
    switch (load_error.code) {
    case ErrorCode::config_invalid:
    case ErrorCode::package_incompatible: return exit_config;
    case ErrorCode::load_failed: return is_whole_archive(model.file) ? 1 : exit_config;
    default: return 1;
    }
}

}  // namespace bulkhead::worker
