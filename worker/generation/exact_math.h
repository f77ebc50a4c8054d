#pragma once

/// Arithmetic that gives the same bits on a CPU and on a GPU. Each sum and product is rounded by
/// itself (files that use it are compiled without fused operations); it uses no library function
/// and no table. So logits and seed alone define a draw, on any device.

#include <bit>
#include <cstdint>
#include <limits>

#if defined(__CUDACC__)
#define BULKHEAD_BOTH __device__
#else
#define BULKHEAD_BOTH
#endif

namespace bulkhead::worker::generation::exact {

BULKHEAD_BOTH inline std::uint32_t bits_of(float value) {
#if defined(__CUDACC__)
    return __float_as_uint(value);
#else
    return std::bit_cast<std::uint32_t>(value);
#endif
}
BULKHEAD_BOTH inline float float_of(std::uint32_t bits) {
#if defined(__CUDACC__)
    return __uint_as_float(bits);
#else
    return std::bit_cast<float>(bits);
#endif
}

inline constexpr float infinity = std::numeric_limits<float>::infinity();

/// Returns an integer that sorts like the number. Equal numbers have one key, also 0 and
/// -0. Not for NaN.
BULKHEAD_BOTH inline std::uint32_t key_of(float value) {
    const std::uint32_t bits = bits_of(value + 0.0F);
    return (bits & 0x8000'0000U) != 0 ? ~bits : bits | 0x8000'0000U;
}

/// e^x for x <= 0, within 2 units of the last place; 0 below -87.
BULKHEAD_BOTH inline float exp_of(float x) {
    if (!(x > -87.0F)) return 0.0F;
    constexpr float magic = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer
    const float shifted = x * 1.44269504F + magic;
    const float n = shifted - magic;
    const float r = (x - n * 0.693359375F) - n * -2.12194440e-4F;  // ln 2 in two parts
    float p = 1.9875691500e-4F;
    p = p * r + 1.3981999507e-3F;
    p = p * r + 8.3334519073e-3F;
    p = p * r + 4.1665795894e-2F;
    p = p * r + 1.6666665459e-1F;
    p = p * r + 5.0000001201e-1F;
    const float y = (p * r * r + r) + 1.0F;
    const std::uint32_t power = (bits_of(shifted) - bits_of(magic) + 127U) << 23;  // n >= -126
    return y * float_of(power);
}

/// Natural logarithm of a normal x > 0, within 2 units of the last place, also near 1.
BULKHEAD_BOTH inline float log_of(float x) {
    std::uint32_t bits = bits_of(x);
    auto n = static_cast<std::int32_t>(bits >> 23) - 127;
    bits = (bits & 0x007f'ffffU) | 0x3f80'0000U;
    float m = float_of(bits);  // [1, 2)
    if (m > 1.41421356F) {
        m *= 0.5F;
        ++n;
    }
    const float f = m - 1.0F;
    const float z = f * f;
    float p = 7.0376836292e-2F;
    p = p * f - 1.1514610310e-1F;
    p = p * f + 1.1676998740e-1F;
    p = p * f - 1.2420140846e-1F;
    p = p * f + 1.4249322787e-1F;
    p = p * f - 1.6668057665e-1F;
    p = p * f + 2.0000714765e-1F;
    p = p * f - 2.4999993993e-1F;
    p = p * f + 3.3333331174e-1F;
    const auto k = static_cast<float>(n);
    return ((f * z * p + k * -2.12194440e-4F) - 0.5F * z + f) + k * 0.693359375F;
}

/// Draws from the exponential distribution of mean 1, from 32 random bits. Small values, which win
/// a race, are precise: -ln(1 - u) is computed as u if 1 - u rounds to 1.
BULKHEAD_BOTH inline float exponential_of(std::uint32_t random) {
    const float u = (static_cast<float>(random) + 0.5F) * 0x1p-32F;
    float rest = 1.0F - u;
    if (rest == 1.0F) return u;
    if (rest < 0x1p-25F) rest = 0x1p-25F;
    return -log_of(rest) * (u / (1.0F - rest));
}

/// A lower bound of `exponential_of`, with room for its rounding.
BULKHEAD_BOTH inline float exponential_least(std::uint32_t random) {
    return (static_cast<float>(random) + 0.5F) * (0x1p-32F * 0.99999F);
}

struct Random4 {
    std::uint32_t word[4];
};

/// Philox 4x32 with 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011):
/// a pure function of counter and key, so each draw has its own numbers and there is no state to
/// save or reset.
BULKHEAD_BOTH inline Random4 philox(std::uint64_t seed, std::uint32_t c0, std::uint32_t c1, std::uint64_t c23) {
    auto k0 = static_cast<std::uint32_t>(seed);
    auto k1 = static_cast<std::uint32_t>(seed >> 32);
    auto c2 = static_cast<std::uint32_t>(c23);
    auto c3 = static_cast<std::uint32_t>(c23 >> 32);
    for (int round = 0; round < 10; ++round) {
        const std::uint64_t a = std::uint64_t{0xD2511F53U} * c0;
        const std::uint64_t b = std::uint64_t{0xCD9E8D57U} * c2;
        c0 = static_cast<std::uint32_t>(b >> 32) ^ c1 ^ k0;
        c1 = static_cast<std::uint32_t>(b);
        c2 = static_cast<std::uint32_t>(a >> 32) ^ c3 ^ k1;
        c3 = static_cast<std::uint32_t>(a);
        k0 += 0x9E3779B9U;
        k1 += 0xBB67AE85U;
    }
    return {{c0, c1, c2, c3}};
}

}  // namespace bulkhead::worker::generation::exact
