#pragma once

/// The small grammars of a fleet file's values: YAML 1.2's core schema, durations,
/// sizes, dimensions.

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "config/fleet.h"

namespace bulkhead::config {

/// Decimal, 0o and 0x: YAML 1.2's unquoted integers.
[[nodiscard]] std::optional<std::int64_t> parse_integer(std::string_view text);
/// An integer or a decimal fraction, also `.inf` and `.nan`.
[[nodiscard]] std::optional<double> parse_number(std::string_view text);
[[nodiscard]] std::optional<bool> parse_boolean(std::string_view text);
/// An unquoted scalar that is text in YAML 1.2: not a number, boolean or null.
[[nodiscard]] bool is_plain_text(std::string_view text);

/// "250ms", "30s", "2m", "1h"; at least 1 ms, at most `limits::duration_max`.
[[nodiscard]] std::optional<std::chrono::milliseconds> parse_duration(std::string_view text);
/// "4096", "64KiB", "4MiB", "2GiB".
[[nodiscard]] std::optional<std::uint64_t> parse_size(std::string_view text);
/// "512", "1..256" or "n=1..256"; ends from 0 to `limits::dim_max`. Does not check that the ends
/// are in order.
[[nodiscard]] std::optional<DimRange> parse_dim(std::string_view text);
/// The inverse of `parse_dim`.
[[nodiscard]] std::string dim_text(const DimRange& range);

/// auto, cpu, cuda:N, GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx
[[nodiscard]] bool is_device(std::string_view text);
/// A model's name: [A-Za-z0-9][A-Za-z0-9._-]{0,62}
[[nodiscard]] bool is_model_name(std::string_view text);
/// A method's name: [A-Za-z_][A-Za-z0-9._-]{0,62}
[[nodiscard]] bool is_method_name(std::string_view text);
/// A tensor's or parameter's name: 1 to 55 printable ASCII characters.
[[nodiscard]] bool is_tensor_name(std::string_view text);
/// A dimension's name: [A-Za-z_][A-Za-z0-9_]{0,31}
[[nodiscard]] bool is_dim_name(std::string_view text);
/// An environment variable's name: [A-Za-z_][A-Za-z0-9_]*
[[nodiscard]] bool is_environment_name(std::string_view text);

}  // namespace bulkhead::config
