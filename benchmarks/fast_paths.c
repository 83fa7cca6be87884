/* Compares the fast paths with the processor's division and square root; made by fast_paths.py. */

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static float as_float(uint32_t bits) { float value; memcpy(&value, &bits, 4); return value; }
static uint32_t as_bits(float value) { uint32_t bits; memcpy(&bits, &value, 4); return bits; }
static float flushed(float value) { return fabsf(value) < 0x1p-126f ? copysignf(0, value) : value; }

/* FAST PATHS */

static long long tested, admitted, wrong;

static void compare(const char *name, float a, float b, float approximation, int is_admitted, float result, float exact) {
    tested++;
    if (!is_admitted) return;
    admitted++;
    if (as_bits(result) == as_bits(exact)) return;
    if (wrong++ < 100000) printf("wrong %s %u %u %u\n", name, as_bits(a), as_bits(b), as_bits(approximation));
}

/* All approximations of `value` within `error`, except that the instructions flush subnormal operands and results. */
static int approximations(float operand, double value, double error, float *found) {
    if (!isnormal(operand) || isnan(value)) {
        found[0] = flushed(operand) == 0 ? copysignf(INFINITY, operand) : (float)value;
        return 1;
    }
    const uint32_t nearest = as_bits((float)value);
    int count = 0;
    for (int step = -3; step <= 3; step++) {
        const float near = as_float(nearest + step);
        if (!(fabs((double)near - value) <= error)) continue;
        found[count++] = flushed(near);
    }
    return count;
}

static void check_root(float v) {
    float found[8];
    const double value = 1 / sqrt((double)v), error = pow(2, -22.9) * value;
    const int count = approximations(v, value, error, found);
    for (int k = 0; k < count; k++) {
        float result;
        const int is_admitted = root(v, found[k], &result);
        compare("root", v, 0, found[k], is_admitted, result, sqrtf(v));
    }
}

static int reciprocals(float b, float *found) {
    int exponent;
    const double value = 1 / (double)b;
    frexp(value, &exponent);
    return approximations(b, value, ldexp(1, exponent - 24), found);
}

static void check_quotient(float a, float b, const float *found, int count) {
    const float exact = a / b;
    for (int k = 0; k < count; k++) {
        float result;
        const int is_admitted = divide(a, b, found[k], &result);
        compare("divide", a, b, found[k], is_admitted, result, exact);
    }
}

static void roots(void) { /* of all numbers between 1/2 and 2, which stand for all in the range */
    for (uint32_t bits = 0x3F000000; bits < 0x40000000; bits++) check_root(as_float(bits));
}

static uint32_t inverse(uint32_t odd) { /* modulo 2^32 */
    uint32_t result = odd;
    for (int k = 0; k < 5; k++) result *= 2 - odd * result;
    return result;
}

/* All quotients a / b of a, b in [1, 2) whose distance to the middle of two numbers is least: with integers A and B,
   and the middle M, A * 2^shift - M * B = k, for |k| <= 8. */
static void quotients(void) {
    for (uint32_t B = 1u << 23; B < 1u << 24; B++) {
        const float b = ldexpf((float)B, -23);
        float found[8];
        const int count = reciprocals(b, found), twos = __builtin_ctz(B);
        if (twos > 3) continue; /* no k is a multiple */
        const uint32_t inverted = inverse(B >> twos);
        for (int shift = 24; shift <= 25; shift++)
            for (int k = -8; k <= 8; k++) {
                if (k == 0 || k % (1 << twos)) continue;
                const uint32_t period = 1u << (shift - twos);
                for (uint64_t M = (uint32_t)(-(k / (1 << twos))) * inverted & (period - 1); M < 1u << 25; M += period) {
                    const int64_t A = ((int64_t)M * B + k) >> shift;
                    if (M < 1u << 24 || M % 2 == 0 || A < 1 << 23 || A >= 1 << 24 || (shift == 24) != (A >= B)) continue;
                    check_quotient(ldexpf((float)A, -23), b, found, count);
                }
            }
    }
}

static uint64_t state = 0x9E3779B97F4A7C15u;
static uint32_t random_bits(void) { /* xorshift64* */
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return (uint32_t)(state * 0x2545F4914F6CDD1Du >> 32);
}

static uint32_t mantissa(int kind) {
    const uint32_t kinds[] = {0, 1, 2, 0x400000, 0x7FFFFE, 0x7FFFFF};
    return kind < 6 ? kinds[kind] : random_bits() & 0x7FFFFF;
}

static void exponents(void) { /* all pairs of exponents, with both signs and special mantissas */
    float found[8];
    for (uint32_t eb = 0; eb < 512; eb++)
        for (int kind_b = 0; kind_b < 8; kind_b++) {
            const float b = as_float(eb << 23 | mantissa(kind_b));
            const int count = reciprocals(b, found);
            check_root(b);
            for (uint32_t ea = 0; ea < 512; ea++)
                for (int kind_a = 0; kind_a < 8; kind_a++)
                    check_quotient(as_float(ea << 23 | mantissa(kind_a)), b, found, count);
        }
}

static void pairs(long long number) { /* random bits, half of them with exponents near those of a step */
    float found[8];
    for (long long k = 0; k < number; k++) {
        uint32_t a = random_bits(), b = random_bits();
        if (k % 2) a = (a & 0x9FFFFFFF) | 0x20000000, b = (b & 0x1FFFFFFF) | 0x20000000;
        const int count = reciprocals(as_float(b), found);
        check_quotient(as_float(a), as_float(b), found, count);
        if (k % 16 == 0) check_root(as_float(b));
    }
}

int main(int count, char **arguments) {
    const char *what = count > 1 ? arguments[1] : "";
    if (!strcmp(what, "roots")) roots();
    if (!strcmp(what, "quotients")) quotients();
    if (!strcmp(what, "exponents")) exponents();
    if (!strcmp(what, "pairs")) pairs(atoll(arguments[2]));
    printf("%lld %lld\n", tested, admitted);
    return 0;
}
