// bulkhead_soak: kills in bulk, and what is left of each resource afterwards. scripts/soak is its face.

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "tests/soak/soak.h"

namespace {

constexpr const char* usage =
    "usage: bulkhead_soak [--worker-kills N] [--supervisor-kills N] [--client-kills N]\n"
    "                     [--model minimal|silero-vad] [--workers N] [--clients N] [--life-ms N] [--pause-ms N]\n"
    "                     [--minutes N] [--seed N]\n";

}  // namespace

int main(int argc, char** argv) {
    ::testing::InitGoogleTest();  // the fixture reports through it
    bulkhead::soak::Options options;
    for (int i = 1; i < argc; ++i) {
        const std::string_view name{argv[i]};
        const char* value = i + 1 < argc ? argv[++i] : nullptr;
        if (value == nullptr) return std::fputs(usage, stderr), 2;
        const long number = std::strtol(value, nullptr, 10);
        if (name == "--model")
            options.model = value;
        else if (name == "--worker-kills")
            options.worker_kills = number;
        else if (name == "--supervisor-kills")
            options.supervisor_kills = number;
        else if (name == "--client-kills")
            options.client_kills = number;
        else if (name == "--workers")
            options.workers = static_cast<int>(number);
        else if (name == "--clients")
            options.clients = static_cast<int>(number);
        else if (name == "--life-ms")
            options.life_ms_max = static_cast<int>(number);
        else if (name == "--pause-ms")
            options.pause_ms = static_cast<int>(number);
        else if (name == "--minutes")
            options.minutes = number;
        else if (name == "--seed")
            options.seed = static_cast<std::uint64_t>(number);
        else
            return std::fputs(usage, stderr), 2;
    }
    if (options.worker_kills == 0 && options.supervisor_kills == 0 && options.client_kills == 0)
        return std::fputs(usage, stderr), 2;
    int wrong = 0;
    if (options.worker_kills > 0) wrong += bulkhead::soak::kill_workers(options);
    if (options.supervisor_kills > 0) wrong += bulkhead::soak::kill_supervisors(options);
    if (options.client_kills > 0) wrong += bulkhead::soak::kill_clients(options);
    if (::testing::Test::HasFailure()) ++wrong;
    std::printf(wrong == 0 ? "nothing drifted, nothing was wrong\n" : "%d things were wrong\n", wrong);
    return wrong == 0 ? 0 : 1;
}
