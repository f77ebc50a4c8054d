#include "ipc/cuda/gpu.h"

#include <bit>

#include <fmt/format.h>

namespace bulkhead::cuda {
namespace {

Result<wire::GpuUuid> uuid_of(const Driver& driver, CUdevice device) {
    CUuuid uuid{};
    if (auto asked = driver.check("cuDeviceGetUuid", driver.cuDeviceGetUuid(&uuid, device)); !asked)
        return asked.error();
    return std::bit_cast<wire::GpuUuid>(uuid);
}

/// Attributes unknown to an old driver count as unsupported.
bool has(const Driver& driver, CUdevice device, int attribute) {
    int value = 0;
    return driver.cuDeviceGetAttribute(&value, attribute, device) == CUDA_SUCCESS && value != 0;
}

std::uint64_t features_of(const Driver& driver, CUdevice device) {
    if (!has(driver, device, CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING)) return 0;
    // CUDA 12 added this attribute (125); before, IPC on Linux needed only unified addressing.
    int ipc = 0;
    if (driver.cuDeviceGetAttribute(&ipc, CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED, device) != CUDA_SUCCESS) ipc = 1;
    if (ipc == 0) return 0;
    std::uint64_t features = wire::feature_cuda_ipc;
    if (has(driver, device, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) &&
        has(driver, device, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED))
        features |= wire::feature_cuda_vmm;
    return features;
}

}  // namespace

Result<std::shared_ptr<const Gpu>> Gpu::open(int ordinal) {
    const Result<const Driver*>& driver = Driver::load();
    if (!driver) return driver.error();
    CUdevice device = 0;
    if (auto got = (*driver)->check("cuDeviceGet", (*driver)->cuDeviceGet(&device, ordinal)); !got)
        return Error{got.error()}.during(fmt::format("opening GPU {}", ordinal));
    return take(**driver, device);
}

Result<std::shared_ptr<const Gpu>> Gpu::open(const wire::GpuUuid& uuid) {
    const Result<const Driver*>& driver = Driver::load();
    if (!driver) return driver.error();
    int count = 0;
    if (auto counted = (*driver)->check("cuDeviceGetCount", (*driver)->cuDeviceGetCount(&count)); !counted)
        return counted.error();
    for (int ordinal = 0; ordinal < count; ++ordinal) {
        CUdevice device = 0;
        if ((*driver)->cuDeviceGet(&device, ordinal) != CUDA_SUCCESS) continue;
        const Result<wire::GpuUuid> its = uuid_of(**driver, device);
        if (its && *its == uuid) return take(**driver, device);
    }
    return Error{ErrorCode::input_invalid,
                 fmt::format("opening {}: none of the {} visible GPUs has this UUID", to_string(uuid), count),
                 "`nvidia-smi -L` lists the GPUs; CUDA_VISIBLE_DEVICES hides those that it does not name"};
}

Result<std::shared_ptr<const Gpu>> Gpu::take(const Driver& driver, CUdevice device) {
    const Result<wire::GpuUuid> uuid = uuid_of(driver, device);
    if (!uuid) return uuid.error();
    std::unique_ptr<Gpu> gpu{new Gpu{driver, device, *uuid}};
    const CUresult retained = driver.cuDevicePrimaryCtxRetain(&gpu->context_, device);
    if (auto made = driver.check("cuDevicePrimaryCtxRetain", retained); !made) {
        gpu->context_ = nullptr;
        return Error{made.error()}.during(fmt::format("opening {}", to_string(*uuid)));
    }
    gpu->features_ = features_of(driver, device);
    return std::shared_ptr<const Gpu>{std::move(gpu)};
}

Gpu::~Gpu() {
    if (context_ != nullptr) (void)driver_.cuDevicePrimaryCtxRelease(device_);
}

void Gpu::synchronize() const noexcept {
    const Current current{*this};
    (void)driver_.cuCtxSynchronize();  // a lost context has nothing to wait for
}

std::string to_string(const wire::GpuUuid& uuid) {
    std::string text = "GPU";
    for (std::size_t i = 0; i < uuid.size(); ++i) {
        if (i == 0 || i == 4 || i == 6 || i == 8 || i == 10) text += '-';
        text += fmt::format("{:02x}", uuid[i]);
    }
    return text;
}

}  // namespace bulkhead::cuda
