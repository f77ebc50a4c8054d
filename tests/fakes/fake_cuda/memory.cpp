#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <map>
#include <mutex>

#include "tests/fakes/fake_cuda/fake.h"

namespace fake_cuda {
namespace {

constexpr std::size_t granularity = 2u << 20;

/// What cuMemCreate or an import made: a reference to memory, with or without a mapping.
struct Handle {
    int fd;
    std::size_t bytes;
    int device;
};

/// Addresses of this process.
struct Range {
    enum class Kind { reserved, mapped, allocated, imported } kind;
    std::size_t bytes;
    int access;  ///< PROT_… flags
    int fd;      ///< of allocated ones, for handles
    int device;
};

std::mutex mutex;
std::map<CUmemGenericAllocationHandle, Handle>& handles() {
    static auto& all = *new std::map<CUmemGenericAllocationHandle, Handle>;
    return all;
}
std::map<CUdeviceptr, Range>& ranges() {
    static auto& all = *new std::map<CUdeviceptr, Range>;
    return all;
}
CUmemGenericAllocationHandle last_handle = 0;

void* address(CUdeviceptr pointer) { return reinterpret_cast<void*>(pointer); }

std::string memfd_name(int device) { return "fake-cuda " + text(visible_gpus()[static_cast<std::size_t>(device)]); }

/// At both ends, as of a former owner.
bool leave_bytes(int fd, std::size_t bytes) {
    std::array<char, 4096> left{};
    left.fill(static_cast<char>(0xa5));
    const std::size_t some = std::min(bytes, left.size());
    return ::pwrite(fd, left.data(), some, 0) >= 0 &&
           ::pwrite(fd, left.data(), some, static_cast<off_t>(bytes - some)) >= 0;
}

int make_memfd(std::size_t bytes, int device) {
    const int fd = ::memfd_create(memfd_name(device).c_str(), MFD_CLOEXEC);
    if (fd >= 0 && ::ftruncate(fd, static_cast<off_t>(bytes)) == 0 && leave_bytes(fd, bytes)) return fd;
    if (fd >= 0) ::close(fd);
    return -1;
}

/// "fake-cuda GPU-…" of a descriptor that came from elsewhere; the GPU's ordinal here, or -1.
int device_of(int fd) {
    std::array<char, 256> name{};
    const auto length = ::readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), name.data(), name.size() - 1);
    if (length <= 0) return -1;
    for (std::size_t i = 0; i < visible_gpus().size(); ++i)
        if (std::string_view{name.data()}.starts_with("/memfd:" + memfd_name(static_cast<int>(i))))
            return static_cast<int>(i);
    return -1;
}

bool is_fake_memory(int fd) {
    std::array<char, 256> name{};
    const auto length = ::readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), name.data(), name.size() - 1);
    return length > 0 && std::string_view{name.data()}.starts_with("/memfd:fake-cuda GPU-");
}

/// Whether the bytes may be accessed so: they are the host's, or of one range that allows it.
bool allowed(CUdeviceptr pointer, std::size_t bytes, int access) {
    const std::scoped_lock lock{mutex};
    auto after = ranges().upper_bound(pointer);
    if (after == ranges().begin()) return true;
    const auto& [start, range] = *std::prev(after);
    if (pointer >= start + range.bytes) return true;
    return pointer + bytes <= start + range.bytes && (range.access & access) == access;
}

}  // namespace

void copy(CUdeviceptr target, CUdeviceptr source, std::size_t bytes) {
    if (context_is_lost()) return;
    if (!allowed(target, bytes, PROT_WRITE) || !allowed(source, bytes, PROT_READ)) return lose_context();
    std::memmove(address(target), address(source), bytes);
}

void fill(CUdeviceptr target, unsigned char value, std::size_t bytes) {
    if (context_is_lost()) return;
    if (!allowed(target, bytes, PROT_WRITE)) return lose_context();
    std::memset(address(target), value, bytes);
}

IpcName name_memfd(const char* magic, int fd, std::uint64_t size_bytes, int device) {
    struct stat status {};
    ::fstat(fd, &status);
    IpcName name{};
    std::memcpy(name.magic.data(), magic, name.magic.size());
    name.pid = ::getpid();
    name.fd = fd;
    name.inode = status.st_ino;
    name.size_bytes = size_bytes;
    name.gpu = visible_gpus()[static_cast<std::size_t>(device)];
    return name;
}

CUresult open_memfd(const char* magic, const IpcName& name, int& fd) {
    if (std::memcmp(name.magic.data(), magic, name.magic.size()) != 0) return CUDA_ERROR_INVALID_VALUE;
    if (name.pid == ::getpid()) return CUDA_ERROR_INVALID_CONTEXT;
    if (visible_gpus()[static_cast<std::size_t>(current()->device)] != name.gpu) return CUDA_ERROR_INVALID_DEVICE;
    const std::string path = "/proc/" + std::to_string(name.pid) + "/fd/" + std::to_string(name.fd);
    fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    struct stat status {};
    if (fd >= 0 && ::fstat(fd, &status) == 0 && status.st_ino == name.inode) return CUDA_SUCCESS;
    if (fd >= 0) ::close(fd);
    fd = -1;
    return CUDA_ERROR_INVALID_VALUE;
}

}  // namespace fake_cuda

using namespace fake_cuda;

FAKE_CUDA_EXPORT CUresult cuMemAlloc_v2(CUdeviceptr* pointer, std::size_t bytes) {
    FAKE_CUDA_NEED_CONTEXT();
    wait_for_all();
    const int fd = make_memfd(bytes, current()->device);
    if (fd < 0) return CUDA_ERROR_OUT_OF_MEMORY;
    void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) {
        ::close(fd);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *pointer = reinterpret_cast<CUdeviceptr>(memory);
    const std::scoped_lock lock{mutex};
    ranges()[*pointer] = {Range::Kind::allocated, bytes, PROT_READ | PROT_WRITE, fd, current()->device};
    return CUDA_SUCCESS;
}

FAKE_CUDA_EXPORT CUresult cuMemAllocHost_v2(void** memory, std::size_t bytes) {
    FAKE_CUDA_NEED_CONTEXT();
    wait_for_all();
    *memory = ::operator new(bytes);
    return CUDA_SUCCESS;
}

FAKE_CUDA_EXPORT CUresult cuMemFreeHost(void* memory) {
    FAKE_CUDA_NEED_CONTEXT();
    wait_for_all();
    ::operator delete(memory);
    return CUDA_SUCCESS;
}

FAKE_CUDA_EXPORT CUresult cuMemFree_v2(CUdeviceptr pointer) {
    FAKE_CUDA_NEED_CONTEXT();
    note("cuMemFree");
    wait_for_all();
    const std::scoped_lock lock{mutex};
    const auto range = ranges().find(pointer);
    if (range == ranges().end() || range->second.kind != Range::Kind::allocated) return CUDA_ERROR_INVALID_VALUE;
    ::munmap(address(pointer), range->second.bytes);
    ::close(range->second.fd);
    ranges().erase(range);
    return CUDA_SUCCESS;
}

FAKE_CUDA_EXPORT CUresult cuMemGetAllocationGranularity(std::size_t* bytes, const CUmemAllocationProp* properties,
                                                        int) {
    FAKE_CUDA_NEED_CONTEXT();
    if (properties->type != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
    *bytes = granularity;
    return CUDA_SUCCESS;
}

FAKE_CUDA_EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, std::size_t bytes,
                                      const CUmemAllocationProp* properties, unsigned long long) {
    FAKE_CUDA_NEED_CONTEXT();
    const int device = properties->location.id;
    if (bytes == 0 || bytes % granularity != 0 || device < 0 ||
        static_cast<std::size_t>(device) >= visible_gpus().size())
        return CUDA_ERROR_INVALID_VALUE;
    const int fd = make_memfd(bytes, device);
    if (fd < 0) return CUDA_ERROR_OUT_OF_MEMORY;
    const std::scoped_lock lock{mutex};
    handles()[*handle = ++last_handle] = {fd, bytes, device};
    return CUDA_SUCCESS;
}

FAKE_CUDA_EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    FAKE_CUDA_NEED_CONTEXT();
    const std::scoped_lock lock{mutex};
    const auto found = handles().find(handle);
    if (found == handles().end()) return CUDA_ERROR_INVALID_VALUE;
    ::close(found->second.fd);
    handles().erase(found);
    return CUDA_SUCCESS;
}

FAKE_CUDA_EXPORT CUresult cuMemExportToShareableHandle(void* shareable, CUmemGenericAllocationHandle handle, int type,
                                                       unsigned long long) {
    FAKE_CUDA_NEED_CONTEXT();
    const std::scoped_lock lock{mutex};
    const auto found = handles().find(handle);
    if (found == handles().end() || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
    const int fd = ::fcntl(found->second.fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) return CUDA_ERROR_OPERATING_SYSTEM;
    std::memcpy(shareable, &fd, sizeof fd);
    return CUDA_SUCCESS;
}

FAKE_CUDA_EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* shareable,
                                                         int type) {
    FAKE_CUDA_NEED_CONTEXT();
    const int theirs = static_cast<int>(reinterpret_cast<std::intptr_t>(shareable));
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || !is_fake_memory(theirs)) return CUDA_ERROR_INVALID_VALUE;
    const int device = device_of(theirs);
    if (device < 0) return CUDA_ERROR_INVALID_DEVICE;
    const int fd = ::fcntl(theirs, F_DUPFD_CLOEXEC, 0);
    struct stat status {};
    if (fd < 0 || ::fstat(fd, &status) != 0) return CUDA_ERROR_OPERATING_SYSTEM;
    const std::scoped_lock lock{mutex};
    handles()[*handle = ++last_handle] = {fd, static_cast<std::size_t>(status.st_size), device};
    return CUDA_SUCCESS;
}

FAKE_CUDA_EXPORT CUresult cuMemAddressReserve(CUdeviceptr* pointer, std::size_t bytes, std::size_t, CUdeviceptr,
                                              unsigned long long) {
    FAKE_CUDA_NEED_CONTEXT();
    if (bytes == 0 || bytes % granularity != 0) return CUDA_ERROR_INVALID_VALUE;
    void* const memory = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    *pointer = reinterpret_cast<CUdeviceptr>(memory);
    const std::scoped_lock lock{mutex};
    ranges()[*pointer] = {Range::Kind::reserved, bytes, PROT_NONE, -1, current()->device};
    return CUDA_SUCCESS;
}

FAKE_CUDA_EXPORT CUresult cuMemAddressFree(CUdeviceptr pointer, std::size_t bytes) {
    FAKE_CUDA_NEED_CONTEXT();
    const std::scoped_lock lock{mutex};
    const auto range = ranges().find(pointer);
    if (range == ranges().end() || range->second.kind != Range::Kind::reserved || range->second.bytes != bytes)
        return CUDA_ERROR_INVALID_VALUE;
    ::munmap(address(pointer), bytes);
    ranges().erase(range);
    return CUDA_SUCCESS;
}

FAKE_CUDA_EXPORT CUresult cuMemMap(CUdeviceptr pointer, std::size_t bytes, std::size_t offset,
                                   CUmemGenericAllocationHandle handle, unsigned long long) {
    FAKE_CUDA_NEED_CONTEXT();
    const std::scoped_lock lock{mutex};
    const auto found = handles().find(handle);
    const auto range = ranges().find(pointer);
    if (found == handles().end() || range == ranges().end() || range->second.kind != Range::Kind::reserved ||
        range->second.bytes != bytes || offset != 0 || bytes > found->second.bytes)
        return CUDA_ERROR_INVALID_VALUE;
    if (::mmap(address(pointer), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, found->second.fd, 0) == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    range->second.kind = Range::Kind::mapped;
    range->second.device = found->second.device;
    return CUDA_SUCCESS;
}

FAKE_CUDA_EXPORT CUresult cuMemUnmap(CUdeviceptr pointer, std::size_t bytes) {
    FAKE_CUDA_NEED_CONTEXT();
    note("cuMemUnmap");
    const std::scoped_lock lock{mutex};
    const auto range = ranges().find(pointer);
    if (range == ranges().end() || range->second.kind != Range::Kind::mapped || range->second.bytes != bytes)
        return CUDA_ERROR_INVALID_VALUE;
    ::mmap(address(pointer), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    range->second.kind = Range::Kind::reserved;
    range->second.access = PROT_NONE;
    return CUDA_SUCCESS;
}

FAKE_CUDA_EXPORT CUresult cuMemSetAccess(CUdeviceptr pointer, std::size_t bytes, const CUmemAccessDesc* desc,
                                         std::size_t count) {
    FAKE_CUDA_NEED_CONTEXT();
    const std::scoped_lock lock{mutex};
    const auto range = ranges().find(pointer);
    if (count != 1 || range == ranges().end() || range->second.kind != Range::Kind::mapped ||
        range->second.bytes != bytes)
        return CUDA_ERROR_INVALID_VALUE;
    if (desc->location.id != range->second.device) return CUDA_ERROR_INVALID_DEVICE;
    const int access = desc->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? PROT_READ | PROT_WRITE
                       : desc->flags == CU_MEM_ACCESS_FLAGS_PROT_READ    ? PROT_READ
                                                                         : PROT_NONE;
    if (::mprotect(address(pointer), bytes, access) != 0) return CUDA_ERROR_INVALID_VALUE;
    range->second.access = access;
    return CUDA_SUCCESS;
}

FAKE_CUDA_EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr pointer) {
    FAKE_CUDA_NEED_CONTEXT();
    const std::scoped_lock lock{mutex};
    const auto range = ranges().find(pointer);
    if (range == ranges().end() || range->second.kind != Range::Kind::allocated) return CUDA_ERROR_INVALID_VALUE;
    *handle = std::bit_cast<CUipcMemHandle>(
        name_memfd("fakecuda", range->second.fd, range->second.bytes, range->second.device));
    return CUDA_SUCCESS;
}

FAKE_CUDA_EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr* pointer, CUipcMemHandle handle, unsigned) {
    FAKE_CUDA_NEED_CONTEXT();
    const auto name = std::bit_cast<IpcName>(handle);
    int fd = -1;
    if (const CUresult found = open_memfd("fakecuda", name, fd); found != CUDA_SUCCESS) return found;
    void* const memory = ::mmap(nullptr, name.size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    ::close(fd);
    if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    *pointer = reinterpret_cast<CUdeviceptr>(memory);
    const std::scoped_lock lock{mutex};
    ranges()[*pointer] = {Range::Kind::imported, name.size_bytes, PROT_READ | PROT_WRITE, -1, current()->device};
    return CUDA_SUCCESS;
}

FAKE_CUDA_EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr pointer) {
    FAKE_CUDA_NEED_CONTEXT();
    note("cuIpcCloseMemHandle");
    const std::scoped_lock lock{mutex};
    const auto range = ranges().find(pointer);
    if (range == ranges().end() || range->second.kind != Range::Kind::imported) return CUDA_ERROR_INVALID_VALUE;
    ::munmap(address(pointer), range->second.bytes);
    ranges().erase(range);
    return CUDA_SUCCESS;
}
