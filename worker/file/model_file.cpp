#include "worker/file/model_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ipc/base/file_identity.h"
#include "ipc/base/whole_io.h"
#include "worker/file/sha256.h"
#include "worker/model/load_limits.h"

namespace bulkhead::worker {
namespace {

Error not_opened(const std::filesystem::path& path, std::string_view what, std::string remedy) {
    return {ErrorCode::load_failed, fmt::format("opening the model file {}: {}", path.string(), what),
            std::move(remedy)};
}

}  // namespace

Result<ModelFile> ModelFile::open_any(const std::filesystem::path& path) {
    // Non-blocking: a FIFO in place of a file is refused instead of awaited.
    ModelFile file{path, UniqueFd{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)}};
    if (!file.fd_) {
        const int number = errno;
        return not_opened(path, std::strerror(number),
                          number == EACCES ? "let the daemon's user read it"
                                           : "correct the model's `file` in the fleet file");
    }
    struct stat status {};
    if (::fstat(file.fd_.get(), &status) != 0) return not_opened(path, std::strerror(errno), "");
    if (!S_ISREG(status.st_mode))
        return not_opened(path, "it is not a regular file",
                          "let the model's `file` name the TorchScript file or the .pt2 package");
    if (status.st_size == 0) return not_opened(path, "it is empty (0 bytes)", "copy or export it again");
    file.size_bytes_ = static_cast<std::uint64_t>(status.st_size);
    file.identity_ = file_identity(status);
    return file;
}

Result<ModelFile> ModelFile::open(const std::filesystem::path& path) {
    auto file = open_any(path);
    if (!file) return file;
    std::array<std::byte, 4> start{};
    const auto got = file->read(start, 0);
    if (!got) return not_opened(path, std::strerror(errno), "check the disk it lies on");
    constexpr std::array zip_magic{std::byte{'P'}, std::byte{'K'}, std::byte{3}, std::byte{4}};
    if (start != zip_magic)
        return not_opened(path,
                          fmt::format("its {} bytes start with {:02x}, a zip archive with 50 4b 03 04",
                                      file->size_bytes_, fmt::join(std::span{start}.first(*got), " ")),
                          "give a file that torch.jit.save or torch._inductor.aoti_compile_and_package has written");
    return file;
}

Result<> ModelFile::unchanged() const {
    struct stat status {};
    if (::fstat(fd_.get(), &status) == 0 && file_identity(status) == identity_) return {};
    return Error{ErrorCode::load_failed, fmt::format("reading {}: it was written to meanwhile", path_.string()),
                 "write model files under another name and rename them when they are whole"};
}

Result<std::string> ModelFile::sha256(const std::function<void(std::uint64_t)>& progress) const {
    Sha256 hash;
    std::vector<std::byte> chunk(limits::io_chunk_bytes);
    for (std::uint64_t offset = 0; offset < size_bytes_;) {
        const auto got = read(chunk, offset);
        if (!got) return system_error(fmt::format("reading {} at byte {}", path_.string(), offset), errno);
        if (*got == 0) break;  // the file became shorter; `unchanged` reports that
        hash.update(std::span{chunk}.first(*got));
        offset += *got;
        if (progress) progress(offset);
    }
    if (auto same = unchanged(); !same) return same.error();
    return hash.hex();
}

std::optional<std::size_t> ModelFile::read(std::span<std::byte> target, std::uint64_t offset) const {
    return read_at(fd_.get(), target, offset);
}

}  // namespace bulkhead::worker
