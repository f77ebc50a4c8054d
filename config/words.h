#pragma once

/// The spelling of each enumeration, the same in the fleet file and in JSON.

#include <array>
#include <string_view>

#include "config/fleet.h"

namespace bulkhead::config {

template <typename E>
struct Word {
    std::string_view text;
    E value;
};

inline constexpr std::array<Word<Runtime>, 3> runtime_words{
    {{"torchscript", Runtime::torchscript}, {"aoti", Runtime::aoti}, {"generate", Runtime::generate}}};
inline constexpr std::array<Word<Graphs>, 3> graphs_words{
    {{"off", Graphs::off}, {"preferred", Graphs::preferred}, {"required", Graphs::required}}};
inline constexpr std::array<Word<RestartPolicy>, 2> restart_words{
    {{"on_crash", RestartPolicy::on_crash}, {"never", RestartPolicy::never}}};
inline constexpr std::array<Word<StateScope>, 2> scope_words{
    {{"none", StateScope::none}, {"channel", StateScope::channel}}};
inline constexpr std::array<Word<LogLevel>, 5> log_level_words{{{"trace", LogLevel::trace},
                                                                {"debug", LogLevel::debug},
                                                                {"info", LogLevel::info},
                                                                {"warn", LogLevel::warn},
                                                                {"error", LogLevel::error}}};
inline constexpr std::array<Word<ParameterType>, 4> parameter_type_words{{{"integer", ParameterType::integer},
                                                                          {"number", ParameterType::number},
                                                                          {"boolean", ParameterType::boolean},
                                                                          {"string", ParameterType::string}}};

template <typename E, std::size_t n>
[[nodiscard]] constexpr std::string_view word_of(const std::array<Word<E>, n>& words, E value) noexcept {
    for (const Word<E>& word : words)
        if (word.value == value) return word.text;
    return "unknown";
}

}  // namespace bulkhead::config
