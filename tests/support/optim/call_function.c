/* Calls a function of a rendered step: reads tables and tensors from standard input, and writes back what may change.

   Input: seven int64 numbers (0 for step, 1 for square_sum, 2 for tensor_sum; chunks; threads; pointers; bytes of the
   tables of segments, of scalars, and of the last one), the bytes of the tensors of each pointer, then the table of
   chunks, those three tables, and the tensors. Output: the last table and the tensors. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef void function(int64_t, const void *, const void *, const void *, const void *, void *, int);
function step, square_sum, tensor_sum __attribute__((weak));

static void *read_bytes(int64_t size) {
    void *bytes = aligned_alloc(64, (size + 127) / 64 * 64);
    if (!bytes || fread(bytes, 1, size, stdin) != (size_t)size) exit(2);
    return bytes;
}

int main(void) {
    function *const functions[] = {step, square_sum, tensor_sum};
    const int64_t *header = read_bytes(7 * sizeof(int64_t));
    const int64_t n_chunks = header[1], n_pointers = header[3], *sizes = read_bytes(n_pointers * sizeof(int64_t));
    const void *chunks = read_bytes(n_chunks * 2 * sizeof(int64_t));
    const void *segments = read_bytes(header[4]), *scalars = read_bytes(header[5]);
    void *last = read_bytes(header[6]), **pointers = malloc(n_pointers * sizeof(void *));
    for (int64_t k = 0; k < n_pointers; k++) pointers[k] = read_bytes(sizes[k]);
    functions[header[0]](n_chunks, chunks, segments, pointers, scalars, last, (int)header[2]);
    fwrite(last, 1, header[6], stdout);
    for (int64_t k = 0; k < n_pointers; k++) fwrite(pointers[k], 1, sizes[k], stdout);
    return fflush(stdout) ? 3 : 0;
}
