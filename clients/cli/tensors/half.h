#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

/// Converts the two 16-bit floating-point formats to and from float; rounds to
/// nearest, ties to even.
namespace bulkhead::cli {

[[nodiscard]] inline float from_bfloat16(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

[[nodiscard]] inline std::uint16_t to_bfloat16(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    // Stays a NaN when cut.
    if (std::isnan(value)) return static_cast<std::uint16_t>((bits >> 16) | 0x40);
    return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

[[nodiscard]] inline float from_float16(std::uint16_t bits) {
    const int exponent = (bits >> 10) & 0x1f;
    const int fraction = bits & 0x3ff;
    float magnitude = 0;
    if (exponent == 0)
        magnitude = std::ldexp(static_cast<float>(fraction), -24);
    else if (exponent < 31)
        magnitude = std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
    else
        magnitude = fraction == 0 ? INFINITY : NAN;
    return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

[[nodiscard]] inline std::uint16_t to_float16(float value) {
    const auto sign = static_cast<std::uint16_t>(std::signbit(value) ? 0x8000 : 0);
    const float magnitude = std::fabs(value);
    if (std::isnan(value)) return sign | 0x7e00;
    if (magnitude >= 65520.0F) return sign | 0x7c00;  // beyond the midpoint above 65504
    int exponent = 0;
    std::frexp(magnitude, &exponent);                      // magnitude = f *
                                                           // 2^exponent, 0.5 <= f < 1
    if (exponent < -13 || magnitude == 0) exponent = -13;  // subnormal: one spacing of 2^-24
    // To 2048.
    const auto steps = static_cast<std::uint32_t>(std::nearbyint(std::ldexp(magnitude, 11 - exponent)));
    return static_cast<std::uint16_t>(sign + (static_cast<std::uint32_t>(exponent + 13) << 10) + steps);
}

}  // namespace bulkhead::cli
