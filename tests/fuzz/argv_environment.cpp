/// What names and starts processes: the strings of a spawn as the keeper takes them apart, a
/// worker's name in its environment, another process' environ, and a person's command line.

#include <cstdio>
#include <iostream>

#include "clients/cli/commands/command.h"
#include "supervisor/base/proc_files.h"
#include "supervisor/keeper/process/spawn_strings.h"
#include "tests/fuzz/fuzz_input.h"
#include "worker/link/identity.h"

namespace {

using namespace bulkhead;
using fuzz::Input;

void split_spawn(Input& input) {
    keeper_link::Spawn spawn{};
    spawn.argv_count = input.take<std::uint32_t>();
    spawn.environment_count = input.take<std::uint32_t>();
    const bool honest = (input.take<std::uint8_t>() & 1) == 0;
    const auto claimed = input.take<std::uint32_t>();
    const auto piece = input.take_all();
    // Of its own size, so that a step too far shows.
    const std::vector<std::byte> bytes{piece.begin(), piece.end()};
    spawn.bytes = honest ? static_cast<std::uint32_t>(bytes.size()) : claimed;

    const auto strings = keeper::split_strings(spawn, bytes);
    if (!strings) return;
    std::size_t total = 0;
    const auto count = [&](char* const* list) {
        std::uint32_t found = 0;
        for (; list[found] != nullptr; ++found) {
            const auto* text = reinterpret_cast<const std::byte*>(list[found]);
            BULKHEAD_PROMISE(text >= bytes.data() && text < bytes.data() + bytes.size());
            total += std::strlen(list[found]) + 1;
        }
        return found;
    };
    BULKHEAD_PROMISE(count(strings->argv) == spawn.argv_count);
    BULKHEAD_PROMISE(count(strings->environment) == spawn.environment_count);
    BULKHEAD_PROMISE(total == bytes.size());
}

void parse_identity(Input& input) {
    const auto identity = worker::Identity::parse(fuzz::as_text(input.take_all()));
    if (!identity) return;
    const auto again = worker::Identity::parse(
        fmt::format("{}:{}/{}#{}", identity->daemon_token, identity->model, identity->replica, identity->generation));
    BULKHEAD_PROMISE(again.has_value() && *again == *identity);
}

void find_variable(Input& input) {
    const std::string name{fuzz::as_text(input.take_piece())};
    const std::string environ_bytes{fuzz::as_text(input.take_all())};
    const auto value = supervisor::environment_value(environ_bytes, name);
    if (!value) return;
    const auto at = static_cast<std::size_t>(value->data() - environ_bytes.data());
    BULKHEAD_PROMISE(at + value->size() <= environ_bytes.size() && value->find('\0') == std::string_view::npos);
    BULKHEAD_PROMISE(environ_bytes.compare(at - name.size() - 1, name.size() + 1, name + "=") == 0);
}

/// Zero-terminated arguments. The command is read, never run.
void parse_command_line(Input& input) {
    std::string text{fuzz::as_text(input.take_all())};
    std::vector<const char*> argv{"bulkhead"};
    for (std::size_t at = 0; at < text.size() && argv.size() < 32; at += std::strlen(text.c_str() + at) + 1)
        argv.push_back(text.c_str() + at);
    cli::Session session;
    const auto status = cli::parse(static_cast<int>(argv.size()), argv.data(), session);
    BULKHEAD_PROMISE(status || session.command);
    BULKHEAD_PROMISE(!status || *status == cli::exit_done || *status == cli::exit_usage);
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
    // Usage and help are not for here; what a sanitizer finds goes to descriptor 2 itself.
    stdout = stderr = std::fopen("/dev/null", "w");
    std::cout.rdbuf(nullptr);
    return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    Input input{data, size};
    switch (input.take<std::uint8_t>() % 4) {
    case 0: split_spawn(input); break;
    case 1: parse_identity(input); break;
    case 2: find_variable(input); break;
    default: parse_command_line(input); break;
    }
    return 0;
}
