#include "supervisor/gpu/nvml.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <utility>

#include <fmt/format.h>

#include "supervisor/base/limits.h"
#include "supervisor/base/text.h"

namespace bulkhead::supervisor {

using Clock = std::chrono::steady_clock;

const GpuProcess* Gpu::find(std::int64_t pid) const {
    const auto found = std::ranges::find(processes, pid, &GpuProcess::pid);
    return found == processes.end() ? nullptr : &*found;
}

std::optional<std::uint64_t> Gpu::unattributed_bytes() const {
    if (!total_bytes || !free_bytes || !processes_known) return std::nullopt;
    std::uint64_t attributed = 0;
    for (const GpuProcess& process : processes) {
        if (!process.bytes) return std::nullopt;
        attributed += *process.bytes;
    }
    const std::uint64_t used = *total_bytes - std::min(*total_bytes, *free_bytes);
    return used - std::min(used, attributed);
}

std::string_view Xid::meaning() const {
    switch (number) {
    case 13: return "graphics engine exception: a kernel's illegal instruction or access";
    case 31: return "MMU fault: an illegal address was accessed";
    case 43: return "GPU stopped processing: the program's fault, others go on";
    case 45: return "preemptive cleanup after an earlier error or a kill";
    case 48: return "double-bit ECC error";
    case 63: return "ECC page retirement or row remapping";
    case 64: return "ECC page retirement or row remapping failed";
    case 74: return "NVLink error";
    case 79: return "GPU has fallen off the bus";
    case 94: return "contained ECC error";
    case 95: return "uncontained ECC error";
    case 119: return "GSP firmware does not answer";
    case 120: return "GSP firmware error";
    default: return "see NVIDIA's list of Xid errors";
    }
}

Nvml::~Nvml() {
    stop();
    ::dlclose(library_);
}

Result<std::unique_ptr<Nvml>> Nvml::open() {
    const char* named = std::getenv("BULKHEAD_NVML");
    const char* path = named != nullptr && *named != '\0' ? named : "libnvidia-ml.so.1";
    void* library = ::dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr)
        return Error{ErrorCode::not_running, fmt::format("loading NVML: {}", escaped(::dlerror())),
                     "install the NVIDIA driver to use GPUs; models run on the CPU"};
    nvml::Functions functions;
    if (const char* missing = functions.load(library)) {
        ::dlclose(library);
        return Error{ErrorCode::not_running, fmt::format("loading NVML: {} lacks {}", path, missing),
                     "install an NVIDIA driver of release 510 or newer"};
    }
    std::unique_ptr<Nvml> nvml{new Nvml{library, functions}};
    if (const int status = nvml->start(); status != nvml::success)
        return Error{ErrorCode::not_running, fmt::format("starting NVML: {}", nvml->functions_.error_string(status)),
                     "run nvidia-smi, which meets the same error"};
    return nvml;
}

int Nvml::start() {
    started_at_ = Clock::now();
    const int status = functions_.init();
    started_ = status == nvml::success;
    in_trouble_ = !started_;
    if (started_ && functions_.events_create != nullptr && functions_.events_create(&events_) != nvml::success)
        events_ = nullptr;
    return status;
}

void Nvml::stop() {
    if (!std::exchange(started_, false)) return;
    if (void* events = std::exchange(events_, nullptr)) functions_.events_free(events);
    watched_.clear();
    functions_.shutdown();
}

Result<unsigned> Nvml::count() {
    const auto failed = [this](int status) {
        in_trouble_ = true;
        return Error{ErrorCode::resources_exhausted,
                     fmt::format("asking NVML for the GPUs: {}", functions_.error_string(status)),
                     "run nvidia-smi, which meets the same error"};
    };
    // Only a restart of the library sees a GPU that came back, or a driver that was loaded again.
    if (in_trouble_ && (!started_ || Clock::now() - started_at_ >= limits::gpu_reopen_pause)) {
        stop();
        if (const int status = start(); status != nvml::success) return failed(status);
    }
    unsigned count = 0;
    if (const int status = functions_.count(&count); status != nvml::success) return failed(status);
    return count;
}

Result<std::vector<Gpu>> Nvml::gpus() {
    const auto there = count();
    if (!there) return there.error();
    in_trouble_ = false;
    std::vector<Gpu> gpus;
    for (unsigned index = 0; index < *there; ++index) gpus.push_back(read(index));
    name_the_lost(gpus);
    return gpus;
}

/// Fills in names of lost GPUs: a GPU that has fallen off the bus no longer reports its name, or is
/// missing from the count while others have moved to its index.
void Nvml::name_the_lost(std::vector<Gpu>& gpus) {
    for (const auto& [uuid, known] : known_) {
        const auto is_seen = [&](const Gpu& gpu) { return gpu.uuid == uuid; };
        if (std::ranges::any_of(gpus, is_seen)) continue;
        const auto nameless =
            std::ranges::find_if(gpus, [&](const Gpu& gpu) { return gpu.uuid.empty() && gpu.index == known.index; });
        if (nameless != gpus.end()) {
            nameless->uuid = uuid;
            nameless->name = known.name;
            continue;
        }
        gpus.push_back(
            {known.index, uuid, known.name, "lost: the driver no longer lists it", true, {}, {}, false, {}});
        in_trouble_ = true;
    }
}

Gpu Nvml::read(unsigned index) {
    Gpu gpu;
    gpu.index = index;
    nvml::Device device = nullptr;
    std::array<char, nvml::uuid_bytes> uuid{};
    std::array<char, nvml::name_bytes> name{};
    int status = functions_.handle(index, &device);
    if (status == nvml::success) status = functions_.uuid(device, uuid.data(), nvml::uuid_bytes);
    if (status == nvml::success) {
        if (functions_.name(device, name.data(), nvml::name_bytes) != nvml::success) name[0] = '\0';
        uuid.back() = name.back() = '\0';
        gpu.uuid = escaped(uuid.data());
        gpu.name = escaped(name.data());
        known_[gpu.uuid] = {index, gpu.name};
        status = read_memory(device, gpu);
    }
    if (status == nvml::success) status = read_processes(device, gpu);
    if (status == nvml::success) {
        gpu.sensors = read_sensors(device);
        watch(device, gpu.uuid);
        if (!gpu.total_bytes || (*gpu.total_bytes > 0 && gpu.free_bytes <= gpu.total_bytes)) return gpu;
        gpu.trouble = fmt::format("failing: the driver says that {} of its {} are free", bytes_text(*gpu.free_bytes),
                                  bytes_text(*gpu.total_bytes));
        return gpu;
    }
    in_trouble_ = true;
    gpu.lost = status == nvml::gpu_is_lost;
    gpu.trouble = fmt::format("{}: {}", gpu.lost ? "lost" : "failing", escaped(functions_.error_string(status)));
    gpu.total_bytes.reset();
    gpu.free_bytes.reset();
    return gpu;
}

int Nvml::read_memory(void* device, Gpu& gpu) const {
    nvml::Memory memory{};
    const int status = functions_.memory(device, &memory);
    if (status == nvml::not_supported) return nvml::success;
    if (status == nvml::success) {
        gpu.total_bytes = memory.total;
        gpu.free_bytes = memory.free;
    }
    return status;
}

int Nvml::read_processes(void* device, Gpu& gpu) const {
    gpu.processes_known = true;
    for (const auto list : {functions_.compute_processes, functions_.graphics_processes}) {
        if (list == nullptr) continue;
        std::vector<nvml::ProcessInfo> infos(limits::gpu_processes_max);
        auto found = static_cast<unsigned>(infos.size());
        const int status = list(device, &found, infos.data());
        if (status == nvml::not_supported || status == nvml::insufficient_size) {
            gpu.processes_known = false;
            continue;
        }
        if (status != nvml::success) return status;
        infos.resize(std::min<std::size_t>(found, infos.size()));
        for (const nvml::ProcessInfo& info : infos) {
            if (gpu.find(info.pid) != nullptr) continue;
            GpuProcess process{info.pid, std::nullopt};
            if (info.used_gpu_memory != nvml::not_available) process.bytes = info.used_gpu_memory;
            gpu.processes.push_back(process);
        }
    }
    return nvml::success;
}

GpuSensors Nvml::read_sensors(void* device) const {
    const auto ask = [&](auto function, auto... what) -> std::optional<unsigned> {
        unsigned value = 0;
        if (function == nullptr || function(device, what..., &value) != nvml::success) return std::nullopt;
        return value;
    };
    GpuSensors sensors;
    sensors.clock_mhz = ask(functions_.clock, nvml::clock_sm);
    sensors.power_mw = ask(functions_.power);
    sensors.temperature_c = ask(functions_.temperature, nvml::temperature_gpu);
    nvml::Utilization used{};
    if (functions_.utilization != nullptr && functions_.utilization(device, &used) == nvml::success)
        sensors.utilization_percent = used.gpu;
    // nvmlClocksThrottleReason*; an idle GPU (1) is not throttled.
    constexpr std::array<std::pair<unsigned long long, std::string_view>, 8> names{{{0x2, "clock setting"},
                                                                                   {0x4, "power cap"},
                                                                                   {0x8, "hardware slowdown"},
                                                                                   {0x10, "sync boost"},
                                                                                   {0x20, "temperature"},
                                                                                   {0x40, "temperature (hardware)"},
                                                                                   {0x80, "power brake"},
                                                                                   {0x100, "display clock setting"}}};
    unsigned long long reasons = 0;
    if (functions_.throttle_reasons != nullptr && functions_.throttle_reasons(device, &reasons) == nvml::success)
        for (const auto& [bit, name] : names)
            if ((reasons & bit) != 0) sensors.throttled.push_back(name);
    return sensors;
}

void Nvml::watch(void* device, const std::string& uuid) {
    if (events_ == nullptr || !watched_.try_emplace(device, uuid).second) return;
    // A GPU without events is simply not watched.
    (void)functions_.events_register(device, nvml::event_xid, events_);
}

std::vector<Xid> Nvml::take_xids() {
    std::vector<Xid> xids;
    nvml::Event event{};
    while (events_ != nullptr && xids.size() < limits::gpu_events_per_read &&
           functions_.events_wait(events_, &event, 0) == nvml::success) {
        const auto device = watched_.find(event.device);
        if (event.type == nvml::event_xid && device != watched_.end()) xids.push_back({device->second, event.data});
    }
    return xids;
}

}  // namespace bulkhead::supervisor
