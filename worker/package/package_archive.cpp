#include "worker/package/package_archive.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <string_view>

#include <caffe2/serialize/inline_container.h>
#include <fmt/format.h>
#include <torch/csrc/export/pt2_archive_constants.h>

#include "ipc/base/whole_io.h"
#include "worker/file/sha256.h"
#include "worker/model/load_limits.h"
#include "worker/torch/file_reader.h"
#include "worker/torch/runtime.h"

namespace bulkhead::worker {
namespace {

using caffe2::serialize::PyTorchStreamReader;
using torch::_export::archive_spec::AOTINDUCTOR_DIR;

/// Whether the path has only names, so that it stays below its target folder.
bool stays_inside(std::string_view path) {
    if (path.empty() || path.size() > limits::package_path_bytes_max) return false;
    for (std::size_t start = 0; start <= path.size();) {
        const auto end = std::min(path.find('/', start), path.size());
        const auto part = path.substr(start, end - start);
        if (part.empty() || part == "." || part == ".." || part.size() > NAME_MAX) return false;
        if (std::ranges::any_of(part, [](char c) { return c == '\0' || c == '\\'; })) return false;
        start = end + 1;
    }
    return true;
}

Result<> make_folders(const std::filesystem::path& root, const std::filesystem::path& below) {
    auto folder = root;
    for (const auto& part : below) {
        folder /= part;
        if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST)
            return system_error(fmt::format("creating {}", folder.string()), errno);
    }
    return {};
}

Result<UnpackedFile> unpack_one(PyTorchStreamReader& archive, const std::string& name,
                                const std::filesystem::path& target, std::vector<std::byte>& chunk) {
    const auto path = target / name;
    if (auto made = make_folders(target, std::filesystem::path{name}.parent_path()); !made) return made.error();
    // O_EXCL: a repeated name is an error, not an overwrite.
    const UniqueFd file{::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600)};
    if (!file) return system_error(fmt::format("creating {}", path.string()), errno);

    UnpackedFile unpacked{name, archive.getRecordSize(name), {}, 0};
    Sha256 hash;
    auto chunks = archive.createChunkReaderIter(name, unpacked.size_bytes, chunk.size());
    for (std::uint64_t done = 0; done < unpacked.size_bytes;) {
        const auto count = chunks.next(chunk.data());
        if (count == 0) throw std::runtime_error{fmt::format("{} ends after {} bytes", name, done)};
        const auto bytes = std::span{chunk}.first(count);
        hash.update(bytes);
        if (!write_all(file.get(), bytes)) return system_error(fmt::format("writing {}", path.string()), errno);
        done += count;
    }
    unpacked.sha256 = hash.hex();
    if (::fsync(file.get()) != 0) return system_error(fmt::format("writing {} to disk", path.string()), errno);
    struct stat status {};
    if (::fstat(file.get(), &status) != 0) return system_error(fmt::format("looking at {}", path.string()), errno);
    unpacked.changed_ns = changed_ns(status);
    return unpacked;
}

}  // namespace

Result<std::vector<UnpackedFile>> unpack_archive(const ModelFile& package, const std::filesystem::path& target,
                                                 const std::function<void(std::uint64_t)>& progress) {
    const auto attempt = fmt::format("unpacking {}", package.path().string());
    const auto refused = [&](std::string_view what) {
        return Error{ErrorCode::load_failed, fmt::format("{}: {}", attempt, what),
                     "export the model again with torch._inductor.aoti_compile_and_package"};
    };
    try {
        PyTorchStreamReader archive{std::make_shared<FileReader>(package, progress)};
        std::vector<std::string> names;
        std::uint64_t total_bytes = 0;
        for (const auto& name : archive.getAllRecords()) {
            if (!stays_inside(name)) return refused(fmt::format("the name \"{}\" leads out of the package", name));
            if (!name.starts_with(AOTINDUCTOR_DIR)) continue;
            names.push_back(name);
            total_bytes += archive.getRecordSize(name);
        }
        if (names.empty())
            return Error{ErrorCode::load_failed, fmt::format("{}: nothing under {} in it", attempt, AOTINDUCTOR_DIR),
                         archive.hasRecord("constants.pkl") ? "it is a TorchScript file: declare `runtime: torchscript`"
                                                            : "export the model with "
                                                              "torch._inductor.aoti_compile_and_package"};
        if (names.size() > limits::package_files_max || total_bytes > limits::package_unpacked_bytes_max)
            return refused(fmt::format("{} files of {} bytes are more than {} or {}", names.size(), total_bytes,
                                       limits::package_files_max, limits::package_unpacked_bytes_max));

        std::vector<std::byte> chunk(limits::io_chunk_bytes);
        std::vector<UnpackedFile> files;
        for (const auto& name : names) {
            auto file = unpack_one(archive, name, target, chunk);
            if (!file) return file.error().during(attempt);
            files.push_back(std::move(file.value()));
        }
        return files;
    } catch (const std::exception& exception) {
        auto error = translate(exception, ErrorCode::load_failed, attempt);
        error.remedy = fmt::format("it has {} bytes: copy it again if that is not all, else export it again",
                                   package.size_bytes());
        return error;
    }
}

}  // namespace bulkhead::worker
