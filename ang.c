#include <stdio.h>
#include <stdlib.h>
void usual(double*,double*,double*,long,double,float*,float*);void any(double*,double*,double*,long,double,float*,float*);
int main(int c,char**v){long n=atol(v[1]);double*d=malloc(n*24);float*o=malloc(n*8);FILE*f=fopen("in.bin","rb");if(fread(d,8,3*n,f)!=3*n)return 1;fclose(f);
f=fopen("out.bin","wb");for(int k=0;k<2;k++){(k?any:usual)(d,d+n,d+2*n,n/16,1.3,o,o+n);fwrite(o,4,2*n,f);}return 0;}