#include "supervisor/gpus.h"

#include <algorithm>

#include <fmt/format.h>

namespace bulkhead::supervisor {

Result<std::vector<Gpu>> Gpus::read() {
    if (!nvml_) {
        auto opened = Nvml::open();
        if (!opened) return opened.error();
        nvml_ = std::move(*opened);
    }
    return nvml_->gpus();
}

std::optional<Gpu> Gpus::read(const std::string& uuid) {
    const auto all = read();
    if (!all) return std::nullopt;
    const auto found = std::find_if(all->begin(), all->end(), [&](const Gpu& gpu) { return gpu.uuid == uuid; });
    return found == all->end() ? std::nullopt : std::optional{*found};
}

Result<Device> place(Gpus& gpus, const std::string& declared) {
    if (declared == "cpu") return Device{};
    const auto there = gpus.read();
    const auto device_of = [](const Gpu& gpu) { return Device{fmt::format("cuda:{}", gpu.index), gpu.uuid}; };
    if (declared == "auto") {
        if (!there || there->empty()) return Device{};
        return device_of(*std::max_element(there->begin(), there->end(),
                                           [](const Gpu& a, const Gpu& b) { return a.free_bytes < b.free_bytes; }));
    }
    const std::string attempt = fmt::format("placing it on device \"{}\"", declared);
    if (!there)
        return Error{ErrorCode::config_invalid, fmt::format("{}: {}", attempt, there.error().attempt),
                     "set device: auto or cpu, or install the NVIDIA driver"};
    std::string known;
    for (const Gpu& gpu : *there) {
        if (declared == gpu.uuid || declared == fmt::format("cuda:{}", gpu.index)) return device_of(gpu);
        known += fmt::format("{}cuda:{} ({}, {})", known.empty() ? "" : ", ", gpu.index, gpu.name, gpu.uuid);
    }
    return Error{ErrorCode::config_invalid, attempt + ": no such GPU",
                 known.empty() ? "NVML sees no GPU; set device: cpu" : "there is " + known};
}

}  // namespace bulkhead::supervisor
