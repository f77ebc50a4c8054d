#include "supervisor/gpu/gpus.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include <fmt/chrono.h>
#include <fmt/format.h>

#include "supervisor/base/limits.h"
#include "supervisor/base/text.h"
#include "supervisor/gpu/nvml_functions.h"

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

namespace {

/// A critical error that the driver reported about a GPU.
struct Xid {
    std::string uuid;
    std::uint64_t number = 0;
    /// Returns the meaning of well-known numbers, else "see NVIDIA's list of Xid errors".
    [[nodiscard]] std::string_view meaning() const {
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
};

/// The driver's management library, loaded at run time. It creates no CUDA context, so it costs no
/// device memory and survives whatever a worker does to its device.
///
/// Thread  any, one at a time; calls may block as long as the driver does, so `Gpus` calls it on a
///         thread of its own
class Nvml {
public:
    /// `$BULKHEAD_NVML`, else libnvidia-ml.so.1.
    static Result<std::unique_ptr<Nvml>> open() {
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
            return Error{ErrorCode::not_running,
                         fmt::format("starting NVML: {}", nvml->functions_.error_string(status)),
                         "run nvidia-smi, which meets the same error"};
        return nvml;
    }
    ~Nvml() {
        stop();
        ::dlclose(library_);
    }
    Nvml(const Nvml&) = delete;
    Nvml& operator=(const Nvml&) = delete;

    /// Returns every GPU with its present memory and processes. A GPU that does not answer has
    /// `trouble` set, with its last known name and UUID.
    /// Errors  resources_exhausted: the driver does not answer; the text is its own
    Result<std::vector<Gpu>> gpus() {
        const auto there = count();
        if (!there) return there.error();
        in_trouble_ = false;
        std::vector<Gpu> gpus;
        for (unsigned index = 0; index < *there; ++index) gpus.push_back(read(index));
        name_the_lost(gpus);
        return gpus;
    }

    /// Returns the errors since the last call, at most `gpu_events_per_read`; never waits. Watches
    /// GPUs from the first call of `gpus` on.
    std::vector<Xid> take_xids() {
        std::vector<Xid> xids;
        nvml::Event event{};
        while (events_ != nullptr && xids.size() < limits::gpu_events_per_read &&
               functions_.events_wait(events_, &event, 0) == nvml::success) {
            const auto device = watched_.find(event.device);
            if (event.type == nvml::event_xid && device != watched_.end()) xids.push_back({device->second, event.data});
        }
        return xids;
    }

private:
    struct Known {
        unsigned index = 0;
        std::string name;
    };
    Nvml(void* library, const nvml::Functions& functions) : library_{library}, functions_{functions} {}

    int start() {
        started_at_ = Clock::now();
        const int status = functions_.init();
        started_ = status == nvml::success;
        in_trouble_ = !started_;
        if (started_ && functions_.events_create != nullptr && functions_.events_create(&events_) != nvml::success)
            events_ = nullptr;
        return status;
    }

    void stop() {
        if (!std::exchange(started_, false)) return;
        if (void* events = std::exchange(events_, nullptr)) functions_.events_free(events);
        watched_.clear();
        functions_.shutdown();
    }

    Result<unsigned> count() {
        const auto failed = [this](int status) {
            in_trouble_ = true;
            return Error{ErrorCode::resources_exhausted,
                         fmt::format("asking NVML for the GPUs: {}", functions_.error_string(status)),
                         "run nvidia-smi, which meets the same error"};
        };
        // Only a restart of the library sees a GPU that came back, or a driver that was loaded
        // again.
        if (in_trouble_ && (!started_ || Clock::now() - started_at_ >= limits::gpu_reopen_pause)) {
            stop();
            if (const int status = start(); status != nvml::success) return failed(status);
        }
        unsigned count = 0;
        if (const int status = functions_.count(&count); status != nvml::success) return failed(status);
        return count;
    }

    /// Fills in names of lost GPUs: a GPU that has fallen off the bus no longer reports its name,
    /// or is missing from the count while others have moved to its index.
    void name_the_lost(std::vector<Gpu>& gpus) {
        for (const auto& [uuid, known] : known_) {
            const auto is_seen = [&](const Gpu& gpu) { return gpu.uuid == uuid; };
            if (std::ranges::any_of(gpus, is_seen)) continue;
            const auto nameless = std::ranges::find_if(
                gpus, [&](const Gpu& gpu) { return gpu.uuid.empty() && gpu.index == known.index; });
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

    Gpu read(unsigned index) {
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
            gpu.trouble = fmt::format("failing: the driver says that {} of its {} are free",
                                      bytes_text(*gpu.free_bytes), bytes_text(*gpu.total_bytes));
            return gpu;
        }
        in_trouble_ = true;
        gpu.lost = status == nvml::gpu_is_lost;
        gpu.trouble = fmt::format("{}: {}", gpu.lost ? "lost" : "failing", escaped(functions_.error_string(status)));
        gpu.total_bytes.reset();
        gpu.free_bytes.reset();
        return gpu;
    }

    int read_memory(void* device, Gpu& gpu) const {
        nvml::Memory memory{};
        const int status = functions_.memory(device, &memory);
        if (status == nvml::not_supported) return nvml::success;
        if (status == nvml::success) {
            gpu.total_bytes = memory.total;
            gpu.free_bytes = memory.free;
        }
        return status;
    }

    int read_processes(void* device, Gpu& gpu) const {
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

    GpuSensors read_sensors(void* device) const {
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
        constexpr std::array<std::pair<unsigned long long, std::string_view>, 8> names{
            {{0x2, "clock setting"},
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

    void watch(void* device, const std::string& uuid) {
        if (events_ == nullptr || !watched_.try_emplace(device, uuid).second) return;
        // A GPU without events is simply not watched.
        (void)functions_.events_register(device, nvml::event_xid, events_);
    }

    void* library_;
    nvml::Functions functions_;
    bool started_ = false;
    bool in_trouble_ = false;  ///< at the last reading: only a restart of the library
                               ///< sees a recovery
    Clock::time_point started_at_{};
    std::map<std::string, Known> known_;    ///< by UUID: every GPU that has ever answered
    void* events_ = nullptr;                ///< the library's event set
    std::map<void*, std::string> watched_;  ///< UUIDs by device handle
};

struct Event {
    std::int64_t time_ms;
    std::string text;
};

std::string text_of(const Xid& xid, std::int64_t time_ms) {
    return fmt::format("Xid {} at {:%H:%M:%S} UTC ({})", xid.number,
                       fmt::gmtime(static_cast<std::time_t>(time_ms / 1'000)), xid.meaning());
}

}  // namespace

/// Shared with the thread that asks the driver, which outlives this object if the driver
/// never answers.
struct Gpus::Reader {
    mutable std::mutex mutex;
    std::condition_variable changed;
    std::uint64_t asked = 0;
    std::uint64_t answered = 0;
    bool late = false;  ///< the caller gave up the present question
    bool ending = false;
    std::optional<Result<std::vector<Gpu>>> answer;
    std::map<std::string, std::deque<Event>> events;  ///< by UUID

    std::thread thread;  ///< started by the first question

    static void work(const std::shared_ptr<Reader>& reader) {
        std::unique_ptr<Nvml> nvml;
        std::unique_lock lock{reader->mutex};
        while (true) {
            reader->changed.wait(lock, [&] { return reader->ending || reader->asked != reader->answered; });
            if (reader->ending) return;
            lock.unlock();
            auto answer = ask(nvml);
            const auto xids = nvml ? nvml->take_xids() : std::vector<Xid>{};
            lock.lock();
            reader->answer = std::move(answer);
            reader->answered = reader->asked;
            for (const Xid& xid : xids) {
                auto& events = reader->events[xid.uuid];
                const std::int64_t now = unix_ms();
                events.push_back({now, text_of(xid, now)});
                if (events.size() > limits::gpu_events_kept) events.pop_front();
            }
            reader->changed.notify_all();
        }
    }

    static Result<std::vector<Gpu>> ask(std::unique_ptr<Nvml>& nvml) {
        if (!nvml) {
            auto opened = Nvml::open();
            if (!opened) return opened.error();
            nvml = std::move(*opened);
        }
        return nvml->gpus();
    }
};

Gpus::Gpus() : reader_{std::make_shared<Reader>()} {}

Gpus::~Gpus() {
    std::unique_lock lock{reader_->mutex};
    reader_->ending = true;
    reader_->changed.notify_all();
    if (!reader_->thread.joinable()) return;
    const bool is_stuck = reader_->asked != reader_->answered;
    lock.unlock();
    is_stuck ? reader_->thread.detach() : reader_->thread.join();
}

Result<std::vector<Gpu>> Gpus::read() {
    Reader& reader = *reader_;
    const auto no_answer = [] {
        return Error{
            ErrorCode::deadline_exceeded,
            fmt::format("asking NVML for the GPUs: no answer within {}", duration_text(limits::gpu_answer_deadline)),
            "the driver hangs: `dmesg` may show the cause; CPU models go on"};
    };
    std::unique_lock lock{reader.mutex};
    if (reader.asked != reader.answered && reader.late) return no_answer();
    ++reader.asked;
    reader.late = false;
    reader.changed.notify_all();
    if (!reader.thread.joinable()) reader.thread = std::thread{[shared = reader_] { Reader::work(shared); }};
    if (!reader.changed.wait_for(lock, limits::gpu_answer_deadline, [&] { return reader.asked == reader.answered; })) {
        reader.late = true;
        return no_answer();
    }
    return *reader.answer;
}

std::optional<Gpu> Gpus::read(const std::string& uuid) {
    const auto all = read();
    if (!all) return std::nullopt;
    const auto found =
        std::ranges::find_if(*all, [&](const Gpu& gpu) { return gpu.uuid == uuid && gpu.trouble.empty(); });
    return found == all->end() ? std::nullopt : std::optional{*found};
}

std::vector<std::string> Gpus::events(const std::string& uuid, std::int64_t since_unix_ms) const {
    const std::lock_guard lock{reader_->mutex};
    std::vector<std::string> texts;
    if (const auto found = reader_->events.find(uuid); found != reader_->events.end())
        for (const Event& event : found->second)
            if (event.time_ms >= since_unix_ms) texts.push_back(event.text);
    return texts;
}

namespace {

Device device_of(const Gpu& gpu) { return {fmt::format("cuda:{}", gpu.index), gpu.uuid}; }

/// Why nothing may start on it now; empty if it may.
Error trouble_of(const Gpu& gpu, const std::map<std::string, std::string>& quarantined) {
    if (!gpu.trouble.empty())
        return {ErrorCode::resources_exhausted, "it is " + gpu.trouble,
                "`nvidia-smi` and `dmesg` may show the cause; a GPU that is lost needs a reset or a reboot"};
    if (const auto found = quarantined.find(gpu.uuid); found != quarantined.end())
        return {ErrorCode::resources_exhausted, "it is quarantined: " + found->second,
                fmt::format("remove the cause, then `bulkhead gpus --lift {}`", gpu.uuid)};
    return {};
}

Result<Device> place_anywhere(const std::vector<Gpu>& gpus, const std::map<std::string, std::string>& quarantined) {
    const Gpu* best = nullptr;
    Error trouble{ErrorCode::resources_exhausted, "placing it on any GPU", {}};
    for (const Gpu& gpu : gpus) {
        if (const Error one = trouble_of(gpu, quarantined); !one.attempt.empty()) {
            trouble.attempt += fmt::format("; cuda:{}: {}", gpu.index, one.attempt);
            trouble.remedy = one.remedy;
        } else if (best == nullptr || best->free_bytes.value_or(0) < gpu.free_bytes.value_or(0)) {
            best = &gpu;
        }
    }
    if (best == nullptr) return trouble;
    return device_of(*best);
}

}  // namespace

Result<Device> place(Gpus& gpus, const std::string& declared, const std::map<std::string, std::string>& quarantined) {
    if (declared == "cpu") return Device{};
    const auto there = gpus.read();
    const bool has_nvml = there || there.error().code != ErrorCode::not_running;
    if (declared == "auto" && (!has_nvml || (there && there->empty()))) return Device{};
    const std::string attempt = fmt::format("placing it on device \"{}\"", declared);
    if (!has_nvml)
        return Error{ErrorCode::config_invalid, fmt::format("{}: {}", attempt, there.error().attempt),
                     "set device: auto or cpu, or install the NVIDIA driver"};
    if (!there)
        return Error{ErrorCode::resources_exhausted, fmt::format("{}: {}", attempt, there.error().attempt),
                     there.error().remedy};
    if (declared == "auto") return place_anywhere(*there, quarantined);
    std::string known;
    for (const Gpu& gpu : *there) {
        if (declared == gpu.uuid || declared == fmt::format("cuda:{}", gpu.index)) {
            Error trouble = trouble_of(gpu, quarantined);
            if (!trouble.attempt.empty()) return std::move(trouble).during(attempt);
            return device_of(gpu);
        }
        known += fmt::format("{}cuda:{} ({}, {})", known.empty() ? "" : ", ", gpu.index, gpu.name, gpu.uuid);
    }
    return Error{ErrorCode::config_invalid, attempt + ": no such GPU",
                 known.empty() ? "NVML sees no GPU; set device: cpu" : "there is " + known};
}

}  // namespace bulkhead::supervisor
