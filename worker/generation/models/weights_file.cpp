#include "worker/generation/models/weights_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <utility>

#include <boost/json.hpp>
#include <fmt/format.h>

#include "ipc/base/unique_fd.h"
#include "ipc/channel/dtype.h"
#include "ipc/channel/tensor_layout.h"
#include "worker/generation/limits.h"
#include "worker/generation/models/manifest.h"
#include "worker/model/parallel_copy.h"

namespace bulkhead::worker::generation {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t copied_at_once = 64 << 20;  ///< between two reports of progress

constexpr std::array<std::pair<std::string_view, wire::DType>, 10> dtypes{{
    {"BOOL", wire::DType::boolean},
    {"U8", wire::DType::uint8},
    {"I8", wire::DType::int8},
    {"I16", wire::DType::int16},
    {"I32", wire::DType::int32},
    {"I64", wire::DType::int64},
    {"F16", wire::DType::float16},
    {"BF16", wire::DType::bfloat16},
    {"F32", wire::DType::float32},
    {"F64", wire::DType::float64},
}};

constexpr std::uint64_t huge_page_bytes = 2 << 20;

/// Parses "always [madvise] never": brackets mark the kernel's setting.
bool huge_pages_are_given() {
    std::ifstream file{"/sys/kernel/mm/transparent_hugepage/enabled"};
    const std::string text{std::istreambuf_iterator<char>{file}, {}};
    return !text.empty() && text.find("[never]") == std::string::npos;
}

Error broken(const fs::path& path, std::string_view what) {
    return {ErrorCode::package_incompatible, fmt::format("reading the weights {}: {}", path.string(), what),
            fmt::format("copy the package again, or {}", export_again)};
}

/// Reads one entry of the header into `tensor`. Returns what is wrong with it, or an empty string.
std::string read_entry(const boost::json::value& entry, std::span<const std::byte> data, WeightTensor& tensor) {
    const auto* object = entry.if_object();
    if (object == nullptr) return "is not an object";
    const auto* dtype = object->if_contains("dtype");
    const auto* shape = object->if_contains("shape");
    const auto* offsets = object->if_contains("data_offsets");
    if (dtype == nullptr || !dtype->is_string() || shape == nullptr || !shape->is_array() || offsets == nullptr ||
        !offsets->is_array() || offsets->as_array().size() != 2)
        return "lacks dtype, shape or data_offsets";
    const auto known = std::ranges::find(dtypes, std::string_view{dtype->as_string()},
                                         &std::pair<std::string_view, wire::DType>::first);
    if (known == dtypes.end())
        return fmt::format("has dtype {}, which is not supported", std::string_view{dtype->as_string()});
    tensor.dtype = known->second;
    const auto dims = boost::json::try_value_to<std::vector<std::int64_t>>(*shape);
    if (!dims || std::ranges::any_of(*dims, [](std::int64_t dim) { return dim < 0; }))
        return "has a shape that is not a list of sizes";
    tensor.dims = *dims;
    const auto range = boost::json::try_value_to<std::array<std::uint64_t, 2>>(*offsets);
    if (!range) return "has offsets that are not positions";
    const auto [begin, end] = *range;
    const auto bytes = tensor_bytes(tensor.dtype, tensor.dims);
    if (!bytes) return fmt::format("has no valid size: {}", bytes.error().attempt);
    if (begin > end || end > data.size() || end - begin != *bytes)
        return fmt::format("lies at bytes {} to {} of {}, but its shape needs {} bytes", begin, end, data.size(),
                           *bytes);
    tensor.bytes = data.subspan(begin, *bytes);
    if (reinterpret_cast<std::uintptr_t>(tensor.bytes.data()) % element_size(tensor.dtype) != 0)
        return "does not start at a multiple of its element";
    return {};
}

}  // namespace

std::optional<HugePages> HugePages::reserve(std::uint64_t bytes) {
    if (!huge_pages_are_given()) return {};
    Mapping mapping{bytes + huge_page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE};
    const std::span<std::byte> all = mapping.bytes();
    if (!mapping || ::madvise(all.data(), all.size(), MADV_HUGEPAGE) != 0) return {};
    // If refused, core files include the weights.
    (void)::madvise(all.data(), all.size(), MADV_DONTDUMP);
    const std::uint64_t past = reinterpret_cast<std::uintptr_t>(all.data()) % huge_page_bytes;
    return HugePages{std::move(mapping), all.subspan(past == 0 ? 0 : huge_page_bytes - past, bytes)};
}

void WeightsFile::copy_to_huge_pages(int threads, const std::function<bool(std::uint64_t)>& go_on) {
    auto memory = HugePages::reserve(size_bytes_);
    if (!memory) return;
    const std::span<const std::byte> file = mapping_.bytes();
    ParallelCopy copy{threads};
    for (std::size_t done = 0; done < file.size();) {
        if (!go_on(done)) return;
        const auto part = file.subspan(done, std::min<std::size_t>(copied_at_once, file.size() - done));
        copy(memory->memory.data() + done, part);
        done += part.size();
    }
    (void)go_on(file.size());
    for (auto& [name, tensor] : tensors_)
        tensor.bytes =
            memory->memory.subspan(static_cast<std::size_t>(tensor.bytes.data() - file.data()), tensor.bytes.size());
    copy_.emplace(std::move(*memory));
    mapping_ = {};
}

Result<WeightsFile> WeightsFile::open(const fs::path& path, std::uint64_t expected_bytes) {
    // A FIFO would wait for its writer.
    const UniqueFd file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
    struct stat status {};
    if (!file || ::fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode))
        return Error{ErrorCode::load_failed,
                     fmt::format("opening the weights {}: {}", path.string(),
                                 file ? "not a regular file" : std::strerror(errno)),
                     "check that the package's folder is complete, and its permissions"};
    const auto bytes = static_cast<std::uint64_t>(status.st_size);
    if (bytes != expected_bytes || bytes < sizeof(std::uint64_t))
        return broken(path, fmt::format("it has {} bytes, its manifest says {}", bytes, expected_bytes));
    Mapping mapping{bytes, PROT_READ, MAP_PRIVATE, file.get()};
    if (!mapping) return system_error(fmt::format("mapping the weights {}", path.string()), errno);
    WeightsFile weights{std::move(mapping)};
    if (auto read = weights.read_header(path); !read) return read.error();
    return weights;
}

Result<> WeightsFile::read_header(const fs::path& path) {
    const std::span<const std::byte> bytes = mapping_.bytes();
    std::uint64_t length = 0;
    std::memcpy(&length, bytes.data(), sizeof length);
    if (length > limits::weights_header_bytes_max || length > bytes.size() - sizeof length)
        return broken(path, fmt::format("its header claims {} bytes of {}", length, bytes.size()));
    const std::string_view text{reinterpret_cast<const char*>(bytes.data()) + sizeof length, length};
    boost::system::error_code error;
    const boost::json::value header = boost::json::parse(text, error);
    if (error || !header.is_object()) return broken(path, "its header is not a JSON object");
    if (header.as_object().size() > limits::weight_tensors_max)
        return broken(path, "its header lists too many tensors");
    const auto data = bytes.subspan(sizeof length + length);
    for (const auto& [name, entry] : header.as_object()) {
        if (name == "__metadata__") continue;
        WeightTensor tensor;
        if (const std::string wrong = read_entry(entry, data, tensor); !wrong.empty())
            return broken(path, fmt::format("tensor {} {}", std::string_view{name}, wrong));
        tensors_.emplace(name, std::move(tensor));
    }
    return {};
}

}  // namespace bulkhead::worker::generation
