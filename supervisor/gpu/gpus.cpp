#include "supervisor/gpu/gpus.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include <fmt/chrono.h>
#include <fmt/format.h>

#include "supervisor/base/limits.h"
#include "supervisor/base/text.h"

namespace bulkhead::supervisor {
namespace {

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
