#include "supervisor/keeper/process/spawn_strings.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

namespace bulkhead::keeper {

std::optional<SpawnStrings> split_strings(const keeper_link::Spawn& spawn, std::span<const std::byte> bytes) noexcept {
    // A string takes one byte at least.
    static std::array<char*, keeper_link::spawn_bytes_max + 2> pointers;
    if (bytes.size() != spawn.bytes || bytes.size() > keeper_link::spawn_bytes_max || spawn.argv_count == 0)
        return std::nullopt;
    const auto* text = reinterpret_cast<const char*>(bytes.data());
    const auto strings = static_cast<std::uint64_t>(std::count(text, text + bytes.size(), '\0'));
    if (strings != std::uint64_t{spawn.argv_count} + spawn.environment_count || text[bytes.size() - 1] != '\0')
        return std::nullopt;

    std::size_t next = 0;
    for (std::uint64_t i = 0; i < strings; ++i) {
        if (i == spawn.argv_count) pointers[next++] = nullptr;
        pointers[next++] = const_cast<char*>(text);
        text += std::strlen(text) + 1;
    }
    if (spawn.environment_count == 0) pointers[next++] = nullptr;
    pointers[next] = nullptr;
    return SpawnStrings{pointers.data(), pointers.data() + spawn.argv_count + 1};
}

}  // namespace bulkhead::keeper
