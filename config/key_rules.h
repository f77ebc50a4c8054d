#pragma once

/// What the keys of a fleet file can hold. `fleet_keys.h`, generated from fleet.schema.json, says
/// it for each key.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace bulkhead::config {

template <typename E>
struct Word {
    std::string_view text;
    E value;
};

/// The spelling of each value of an enumeration, in the fleet file and in JSON.
template <typename E>
inline constexpr std::array<Word<E>, 0> words{};

template <typename E>
[[nodiscard]] constexpr std::string_view word_of(E value) noexcept {
    for (const Word<E>& word : words<E>)
        if (word.value == value) return word.text;
    return "unknown";
}

namespace rule {

struct Integer {
    std::int64_t min;
    std::int64_t max;
};
struct Lengths {  ///< of attention, ascending
    std::size_t count_max;
    std::int64_t min;
    std::int64_t max;
};
struct Size {
    std::uint64_t min;
    std::uint64_t max;
};
struct Duration {};
struct KeepAlive {};  ///< empty: forever
struct Boolean {};
struct Enumeration {};
struct Group {};
struct Ignored {  ///< a key of former releases
    std::string_view remedy;
};

// Of a whole `ModelSpec`.
struct Device {};
struct Replicas {};
struct Preload {};
struct ModelGroup {};
struct Environment {};
struct State {};

}  // namespace rule
}  // namespace bulkhead::config
